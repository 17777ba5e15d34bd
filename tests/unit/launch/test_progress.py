"""What a person sees while the cluster starts."""

from io import StringIO

import pytest
from rich.console import Console

from triptych.launch.progress import StartProgress
from triptych.launch.supervisor import Child, ChildState


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_worker_that_is_ready_is_named_once_with_its_address(is_terminal: bool) -> None:
    seen = StringIO()
    with StartProgress(Console(file=seen, force_terminal=is_terminal)) as progress:
        progress.show(Child("encode-0", loaded=0.5))
        for _ in range(3):
            progress.show(Child("encode-0", ChildState.READY, loaded=1.0, url="http://127.0.0.1:4242"))
    assert seen.getvalue().count("encode-0 at http://127.0.0.1:4242 is ready") == 1
