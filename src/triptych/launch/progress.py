"""`StartProgress`: what a person sees on stderr while the cluster starts: a line with its address for each worker that is ready (its
/metrics are there), and on a terminal a bar for each that is not."""

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from triptych.launch.supervisor import Child, ChildState


class StartProgress:
    """Use as a context manager around the start."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[doing]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._ready: set[str] = set()

    def __enter__(self) -> "StartProgress":
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def show(self, child: Child) -> None:
        """Say how far `child` is."""
        is_ready = child.state is ChildState.READY
        if child.name not in self._tasks:
            self._tasks[child.name] = self._bars.add_task(child.name, total=1.0, doing="")
        doing = "ready" if is_ready else "loading weights" if child.loaded else "starting"
        self._bars.update(self._tasks[child.name], completed=child.loaded, doing=doing)
        if is_ready and child.name not in self._ready:
            self._console.print(f"{child.name} at {child.url} is ready", highlight=False, soft_wrap=True)
        if is_ready:
            self._ready.add(child.name)
