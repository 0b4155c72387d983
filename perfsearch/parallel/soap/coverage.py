"""How much of a model has rules for splitting it."""

from __future__ import annotations

from dataclasses import dataclass

from perfsearch.parallel.soap.graph import WHOLE, Graph, Operator


@dataclass(frozen=True)
class Coverage:
    """What a search can split, and what runs whole on one device.

    Attributes:
        operators: that a plan configures.
        flops: of their forward passes.
        missing: those of them that have no rule.

    """

    operators: int
    flops: float
    missing: tuple[Operator, ...]

    @property
    def operators_share(self) -> float:
        """Of operators, those with a rule; 1 is all."""
        return 1.0 - len(self.missing) / self.operators if self.operators else 1.0

    @property
    def flops_share(self) -> float:
        """Of FLOPs, those of operators with a rule."""
        missing = sum(operator.flops for operator in self.missing)
        return 1.0 - missing / self.flops if self.flops else 1.0

    def line(self) -> str:
        """For the terminal."""
        covered = self.operators - len(self.missing)
        text = (
            f"{covered} of {self.operators} operators ({self.flops_share:.1%} of forward FLOPs) "
            "can be split"
        )
        if self.missing:
            names = ", ".join(_described(operator) for operator in self.missing[:3])
            more = len(self.missing) - 3
            text += f"; whole on one device: {names}" + (f" and {more} more" if more > 0 else "")
        return text

    def refusal(self, least: float) -> str | None:
        """Why a search is not worth while; ``None`` where it is.

        Args:
            least: smallest acceptable share, of operators as well as of FLOPs.

        """
        share = min(self.operators_share, self.flops_share)
        if share >= least:
            return None
        listed = "\n".join(f"  {_described(operator)}" for operator in self.missing)
        return (
            f"{share:.1%} of the model has rules for splitting, and {least:.1%} is asked for. "
            f"Without a rule:\n{listed}\n"
            "Replace these by functions that have one, or lower the threshold: they then run "
            "whole, on one device each."
        )


def coverage(graph: Graph) -> Coverage:
    """Look for rules of all operators that a plan configures."""
    planned = graph.planned
    return Coverage(
        operators=len(planned),
        flops=sum(operator.flops for operator in planned),
        missing=tuple(operator for operator in planned if operator.kind == WHOLE),
    )


def _described(operator: Operator) -> str:
    target = operator.attributes.get("target", operator.kind)
    place = f" at {operator.source}" if operator.source else ""
    return f"{operator.name} ({target}){place}"
