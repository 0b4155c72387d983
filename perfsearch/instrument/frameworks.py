"""What is met in frameworks once a script imports them. No torch here."""

from __future__ import annotations

CALLBACKS = "callbacks"
METRICS = "reduce_metrics"

ENGINE = "deepspeed.runtime.engine"
"""DeepSpeed's module of its engine."""

_RESULTS = "trainer.connectors.logger_connector.result"
CALLS = (
    ("transformers.trainer_callback", "CallbackHandler.call_event", CALLBACKS),
    ("lightning.pytorch.trainer.call", "_call_callback_hooks", CALLBACKS),
    ("pytorch_lightning.trainer.call", "_call_callback_hooks", CALLBACKS),
    ("transformers.trainer_pt_utils", "nested_gather", METRICS),
    ("accelerate.accelerator", "Accelerator.gather_for_metrics", METRICS),
    (f"lightning.pytorch.{_RESULTS}", "_ResultCollection.metrics", METRICS),
    (f"pytorch_lightning.{_RESULTS}", "_ResultCollection.metrics", METRICS),
)
"""Module, function in it, and the phase that its calls are; each module is named once."""

MODULES = (ENGINE, *(module for module, _, _ in CALLS))
"""They import torch on their way, with which the instruments come."""
