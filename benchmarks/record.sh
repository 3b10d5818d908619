#!/usr/bin/env bash
# Records the result files of docs/benchmarks.md, a folder of OUT for each:
#
#   benchmarks/record.sh forward|backward OUT [option ...]   one GPU, about 8 minutes
#   benchmarks/record.sh ring OUT [option ...]               all GPUs of the host
#
# Options go to every command: --fa3 LIBRARY, and with forward and backward --fa4 FOLDER.
set -euo pipefail
group=$1 out=$2
shift 2

attention() {  # NAME argument ...: one result folder
  local name=$1
  shift
  python -m ringfa3.bench attention -q --out "$out/$name" "$@"
}

ring() {
  local name=$1
  shift
  torchrun --standalone --nproc-per-node gpu -m ringfa3.bench ring -q --out "$out/$name" "$@"
}

case $group in
  forward)
    attention paper-forward --set paper --direction fwd "$@"
    attention scores-forward --set scores --direction fwd --peers fa3 fa4 --sample-ms 10 "$@"
    attention gqa-forward --set gqa --direction fwd "$@"
    attention mqa-hops --set mqa hops --direction fwd "$@"
    attention masks-forward --set masks --direction fwd "$@"
    attention merge --set merge --direction fwd
    ;;
  backward)
    attention paper-backward --set paper --direction bwd "$@"
    attention gqa-backward --set gqa --direction bwd "$@"
    attention masks-backward --set masks --direction bwd "$@"
    attention deterministic --set deterministic --direction bwd "$@"
    attention scores-errors-backward --set scores --direction bwd --errors-only "$@"
    ;;
  ring)
    ring lengths --set lengths "$@"
    ring sets --set documents window error memory host checkpoint "$@"
    ;;
  *)
    echo "record.sh: no group $group; allowed are forward, backward, ring" >&2
    exit 2
    ;;
esac
