#!/bin/sh
# One encode, one prefill and one decode worker (E1P1D1), each part started by hand, as a process manager would. Ctrl-C stops all.
# `triptych serve MODEL --encode 1 --prefill 1 --decode 1` does the same with one command.
#   examples/serve_1e1p1d.sh [MODEL] [PORT]
command -v triptych >/dev/null || { echo "triptych is not on the PATH; try PATH=.venv/bin:\$PATH $0" >&2; exit 1; }
model=${1:-demo}
port=${2:-8000}
# What all parts share, and nobody else may know; on several hosts, set it to the same in each environment.
TRIPTYCH_CLUSTER_SECRET=${TRIPTYCH_CLUSTER_SECRET:-$(od -An -tx1 -N32 /dev/urandom | tr -d ' \n')}
export TRIPTYCH_CLUSTER_SECRET
trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT
trap exit INT TERM

triptych route "$model" --layout E1P1D1 --port "$port" &
for role in E P D; do
    triptych worker "$model" --role "$role" --router "http://127.0.0.1:$port" &
done
wait
