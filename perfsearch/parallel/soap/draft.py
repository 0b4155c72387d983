"""An operator in the making."""

from __future__ import annotations

from dataclasses import dataclass, field

from perfsearch.parallel.soap.graph import Parameter
from perfsearch.parallel.soap.lowering import Lowered, Value


@dataclass
class Draft:
    """An operator in the making.

    Attributes:
        name: of the traced call.
        kind: of the first stage.
        value: the output.
        lowered: the first stage; ``None`` for inputs.
        parameters: of the first stage.
        module: path of the module that calls it.
        place: in the user's code.
        followers: stages that were joined.
        output: of the last stage.

    """

    name: str
    kind: str
    value: Value
    lowered: Lowered | None
    parameters: tuple[Parameter, ...]
    module: str
    place: str
    followers: list[Draft] = field(default_factory=list)

    @property
    def stages(self) -> list[Draft]:
        """The first and those that follow."""
        return [self, *self.followers]

    @property
    def output(self) -> Value:
        """Of the last stage."""
        return self.stages[-1].value
