#!/usr/bin/env bash
# Run a command in one of the project's three environments, setting it up on first use:
#     scripts/run.sh indexcache-search
#     scripts/run.sh pytest
#     scripts/run.sh --sglang pytest -m "sglang and not slow"             (SGLang 0.5.23 on CPU: Linux, 11 GB)
#     scripts/run.sh --newest python -m pytest -m newest                  (the newest that pyproject.toml allows: 5 GB)
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
base= # an environment that this one lies on top of
if [ "${1:-}" = --newest ]; then
  shift
  "$0" true
  base=${INDEXCACHE_VENV:-$root/.venv}
  venv=${INDEXCACHE_NEWEST_VENV:-$root/.venv-newest}
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
install_all() { # by uv, the user's or one in the environment: a tenth of pip's time; where it can't, by pip
  local uv=$venv/bin/uv options=()
  if [ "$base" ]; then # uv does not see what lies below
    "$venv/bin/pip" install -q --upgrade "${projects[@]}"
    return
  fi
  if command -v uv >/dev/null; then uv=uv; else "$venv/bin/pip" install -q -c "$constraints" uv || true; fi
  mapfile -t options < <("$venv/bin/python" "$root/scripts/tools/pip_indexes.py")
  "$uv" pip install --python "$venv/bin/python" "${options[@]}" -c "$constraints" "${projects[@]}" && return
  echo "uv can't install it (see above): pip takes a few minutes" >&2
  "$venv/bin/pip" install -q -c "$constraints" "${projects[@]}"
}
stamp=$venv/.installed-from
today=${base:+$(date +%F)} # what is the newest changes
wanted=$(cat "$root/pyproject.toml" "$root/tests/sglang_cpu/pyproject.toml" "${constraints:-/dev/null}" - <<<"$today" | sha256sum)
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
  echo "Setting up $venv (once, minutes at most)" >&2
  python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed" >&2; exit 2; }
  python3 -m venv "$venv"
  if [ "$base" ]; then
    "$base/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
      > "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
  fi
  install_all
  echo "$wanted" > "$stamp"
fi
export PATH=$venv/bin:$PATH
exec "$@"
