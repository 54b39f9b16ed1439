"""The job that examines a user's function and works out its answers for the gate."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from runs.record import Reference
from space.variant import Problem, Shape

if TYPE_CHECKING:
    from tuner.evaluate.bench import Bench


@dataclass(frozen=True, slots=True)
class Probed:
    """What became of an examination; `fault` is empty when the function will do."""

    fault: str = ""


@dataclass(frozen=True, slots=True)
class ProbeJob:
    """Examine a function for each problem, and write what it gives to the file beside it."""

    reference: Reference
    #: (problem, its shapes, file of the answers)
    problems: tuple[tuple[Problem, tuple[Shape, ...], str], ...]
    limit_s: float

    def run(self, bench: Bench | None) -> Probed:
        """Do the work, on the CPU."""
        from tuner.evaluate.function import MOST_SCORES, Function, FunctionRefused
        from tuner.evaluate.function_cases import cases_of
        from tuner.evaluate.gate import save

        try:
            for problem, shapes, path in self.problems:
                function = Function.load(self.reference, problem)
                for shape in shapes:
                    scores = shape.heads * shape.seqlen_q * shape.seqlen_k
                    if not function.has_rows and scores > MOST_SCORES:
                        raise FunctionRefused(
                            f"{function.name} gives no rows alone, and all of shape {shape.key} "
                            f"are {scores * 8 / 2**30:.0f} GiB of scores a batch element; name "
                            f"shorter --shapes"
                        )
                keys = max((s.seqlen_k for s in shapes), default=0)
                save(Path(path), cases_of(function, problem, keys))
        except FunctionRefused as refused:
            return Probed(str(refused))
        except OSError as error:
            return Probed(f"{self.reference.name}: cannot keep its answers: {error}")
        return Probed()
