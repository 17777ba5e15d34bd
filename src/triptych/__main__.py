"""`python -m triptych` is the command `triptych`."""

from triptych.cli import main

main()
