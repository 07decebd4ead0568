"""What a comparison of two libraries found: the largest difference a quantity, and whether the controls were seen."""

import torch


class Report:
    """Largest difference a quantity, over all cases."""

    def __init__(self, bound: float) -> None:
        """`bound`: the largest difference that counts as none."""
        self.bound = bound
        self.worst: dict[str, float] = {}
        self.controls: dict[str, float] = {}
        self.others: dict[str, float] = {}

    def same(self, name: str, theirs, ours) -> None:
        self._keep(self.worst, name, theirs, ours)

    def differs(self, name: str, theirs, ours) -> None:
        """A control: computed with a known fault, it must be seen."""
        self._keep(self.controls, name, theirs, ours)

    def other(self, name: str, theirs, ours) -> None:
        """What the two compute differently on purpose; README.md says why."""
        self._keep(self.others, name, theirs, ours)

    @staticmethod
    def _keep(table: dict[str, float], name: str, theirs, ours) -> None:
        theirs, ours = (torch.as_tensor(x, dtype=torch.float64) for x in (theirs, ours))
        assert theirs.shape == ours.shape, f"{name}: {tuple(theirs.shape)} against {tuple(ours.shape)}"
        gap = float((theirs - ours).abs().max())
        table[name] = max(table.get(name, 0.0), gap if gap == gap else float("inf"))

    def told(self) -> bool:
        """Print a line a quantity; whether all that must agree does, and all that must differ."""
        for name, gap in self.worst.items():
            print(f"{'ok  ' if gap <= self.bound else 'FAIL'}  {gap:.1e}  {name}")
        for name, gap in self.controls.items():
            print(f"{'ok  ' if gap > self.bound else 'FAIL'}  {gap:.1e}  {name} (a control: must differ)")
        for name, gap in self.others.items():
            print(f"{'ok  ' if gap > self.bound else 'FAIL'}  {gap:.1e}  {name} (differs on purpose)")
        unlike = [*self.controls.values(), *self.others.values()]
        largest = max(self.worst.values())
        good = largest <= self.bound < min(unlike)
        print(f"largest difference {largest:.1e}, bound {self.bound:.0e}: {'passed' if good else 'FAILED'}")
        return good
