#!/usr/bin/env bash
# Runs `make test` once under each setting that changes how a CPU computes, and prints a table: setting, passed, failed, seconds.
# Started by hand (`make test-cpus`), not by CI: it takes six times as long as `make test`. Exits with 1 if a test failed.
set -uo pipefail
cd "$(dirname "$0")/.."
mkdir -p build/cpus

count() { # how many tests pytest's summary, such as "3 failed, 1500 passed in 240.1s", counts as $1
    grep -oE "[0-9]+ ($1)" <<<"$summary" | awk '{sum += $1} END {print sum + 0}'
}

status=0
printf '%-30s %7s %7s %8s\n' setting passed failed seconds
for setting in OMP_NUM_THREADS=1 OMP_NUM_THREADS=2 ATEN_CPU_CAPABILITY=default ATEN_CPU_CAPABILITY=avx2 \
    ONEDNN_MAX_CPU_ISA=AVX2 MKL_CBWR=COMPATIBLE; do
    log=build/cpus/$setting.txt note='' SECONDS=0
    env "$setting" make --silent test >"$log" 2>&1 || { status=1; note="  see $log"; }
    summary=$(grep -E ' in [0-9.]+s' "$log" | tail -n 1)
    printf '%-30s %7s %7s %8s%s\n' "$setting" "$(count passed)" "$(count 'failed|errors?')" "$SECONDS" "$note"
done
exit $status
