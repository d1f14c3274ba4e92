#!/usr/bin/env bash
# Run a command in one of the project's three environments, setting it up on first use:
#     scripts/run.sh indexcache-search
#     scripts/run.sh pytest
#     scripts/run.sh --sglang pytest -m "sglang and not slow"             (SGLang 0.5.23 on CPU: Linux, 11 GB)
#     scripts/run.sh --newest python -m pytest -m newest                  (the newest that pyproject.toml allows: 5 GB)
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
base= # an environment that this one lies on top of
options=(-q)
if [ "${1:-}" = --newest ]; then
  shift
  "$0" true
  base=${INDEXCACHE_VENV:-$root/.venv}
  venv=${INDEXCACHE_NEWEST_VENV:-$root/.venv-newest}
  constraints=/dev/null
  options+=(--upgrade)
  projects=(-e "$root[dev]" pydantic rich torch transformers triton typer)
elif [ "${1:-}" = --sglang ]; then
  shift
  venv=${INDEXCACHE_SGLANG_VENV:-$root/.venv-sglang}
  constraints=$root/scripts/constraints-sglang.txt
  projects=(-e "$root[dev,sglang]" -e "$root/tests/sglang_cpu")
  export INDEXCACHE_REQUIRE_SGLANG=1 # its absence is a failure, not a skip
else
  venv=${INDEXCACHE_VENV:-$root/.venv}
  constraints=$root/scripts/constraints.txt
  projects=(-e "$root[dev,docs,lint,manifests]")
fi
stamp=$venv/.installed-from
today=${base:+$(date +%F)} # what is the newest changes
wanted=$(cat "$root/pyproject.toml" "$root/tests/sglang_cpu/pyproject.toml" "$constraints" - <<<"$today" | sha256sum)
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
  echo "Setting up $venv (a few minutes, once)" >&2
  python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed" >&2; exit 2; }
  python3 -m venv "$venv"
  if [ "$base" ]; then
    "$base/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
      > "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
  fi
  "$venv/bin/pip" install "${options[@]}" -c "$constraints" "${projects[@]}"
  echo "$wanted" > "$stamp"
fi
export PATH=$venv/bin:$PATH
exec "$@"
