#!/bin/sh
# One encode worker, one worker that prefills and decodes (E1PD1), with one command. Ctrl-C stops all.
#   examples/serve_1e1pd.sh [MODEL] [PORT]
exec triptych serve "${1:-demo}" --layout E1PD1 --port "${2:-8000}"
