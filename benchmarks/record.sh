#!/usr/bin/env bash
# Records the result folders of docs/benchmarks/. Without arguments it prints how to call it.
set -euo pipefail

usage() {
  cat >&2 <<'END'
usage: benchmarks/record.sh GROUP OUT [option ...]

GROUP   forward, backward, 8-bits, host (one GPU) or ring (all GPUs of the host)
OUT     a folder; each result is a folder in it
option  of every command: --fa3 LIBRARY; with forward and backward --fa4 FOLDER
END
  exit 2
}

[[ $# -ge 2 ]] || usage
group=$1 out=$2
shift 2
options=("$@")

attention() {  # NAME argument ...: one result folder
  local name=$1
  shift
  python -m ringfa3.bench attention -q --out "$out/$name" "$@" "${options[@]}"
}

ring() {
  local name=$1
  shift
  torchrun --standalone --nproc-per-node gpu -m ringfa3.bench ring -q --out "$out/$name" \
    "$@" "${options[@]}"
}

case $group in
  forward)
    attention paper-forward --set paper --direction fwd
    attention scores-forward --set scores --direction fwd --peers fa3 fa4 --sample-ms 10
    attention gqa-forward --set gqa --direction fwd
    attention mqa-hops-forward --set mqa hops --direction fwd
    attention masks-forward --set masks --direction fwd
    ;;
  backward)
    attention paper-backward --set paper --direction bwd
    attention gqa-backward --set gqa --direction bwd
    attention mqa-hops-backward --set mqa hops --direction bwd
    attention masks-backward --set masks --direction bwd
    attention deterministic --set deterministic --direction bwd
    attention scores-errors-backward --set scores --direction bwd --errors-only
    ;;
  8-bits)
    attention fp8 --set fp8 --peers fa3 --sample-ms 10
    attention int8 --set int8 --peers fa3 --sample-ms 10
    # alone: FA3's library may bring another CUDA runtime, which cuDNN's frontend refuses
    python -m ringfa3.bench attention -q --out "$out/fp8-cudnn" --set fp8 --peers cudnn
    ;;
  host)
    attention host --set host
    attention paper-one-by-one --set paper --one-by-one --peers fa3 --sample-ms 5
    ;;
  ring)
    ring lengths --set lengths --transport symmetric nccl
    ring sets --set documents window error memory host checkpoint
    ;;
  *)
    echo "record.sh: no group $group; allowed are forward, backward, 8-bits, host, ring" >&2
    usage
    ;;
esac
