"""Scripts whose steps are mostly spent in one known place."""

import sys
import time

import torch

MS = 15
"""What the place takes."""


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        sample = torch.randn(16, generator=generator)
        return {"x": sample, "labels": sample.sum()}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(16, 1)

    def forward(self, x, labels):
        return {"loss": (self.head(x).squeeze(1) - labels).square().mean()}


def plain(place):
    """A loop of the script's own."""
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = Net() if place == "alone" else torch.nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters())

    class Slow(torch.optim.lr_scheduler.StepLR):
        def step(self, epoch=None):
            super().step()
            time.sleep(MS / 1e3 if place == "scheduler" else 0)

    class SlowData(Data):
        def __getitem__(self, index):
            time.sleep(MS / 4e3 if place == "loader" else 0)
            return super().__getitem__(index)

    scheduler = Slow(optimizer, 10)
    for batch in torch.utils.data.DataLoader(SlowData(), 4):
        model(**batch)["loss"].backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        time.sleep(MS / 1e3 if place in ("own", "alone") else 0)


def hf_trainer():
    """Hugging Face's, with a callback at the end of each step."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Slow(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            time.sleep(MS / 1e3)

    arguments = TrainingArguments(
        output_dir="out", use_cpu=True, max_steps=100_000, per_device_train_batch_size=4,
        report_to="none", save_strategy="no", logging_strategy="no", ddp_backend="gloo",
    )  # fmt: skip
    Trainer(model=Net(), args=arguments, train_dataset=Data(), callbacks=[Slow()]).train()


def lightning_trainer():
    """Lightning's, with a callback at the end of each step."""
    import lightning

    class Slow(lightning.Callback):
        def on_train_batch_end(self, *args, **kwargs):
            time.sleep(MS / 1e3)

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, batch, number):
            return self.net(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    lightning.Trainer(
        accelerator="cpu", devices=1, max_steps=100_000, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[Slow()],
    ).fit(Module(), torch.utils.data.DataLoader(Data(), 4))  # fmt: skip


if __name__ == "__main__":
    kind = sys.argv[1]
    made = {"hf-trainer": hf_trainer, "lightning": lightning_trainer}
    made[kind]() if kind in made else plain(kind)
