# Sourced by tiny.sh and test.sh: a virtual environment in .venv with q38 and the given extras.
# Usage: . scripts/setup.sh EXTRAS
python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "q38 needs Python 3.11 or newer; $("$python" --version 2>&1) is here. Set PYTHON to a newer one." >&2
    exit 3
fi
if [ ! -x .venv/bin/pip ]; then
    "$python" -m venv .venv
fi
.venv/bin/pip install --quiet --disable-pip-version-check -c constraints/cpu.txt -e ".[$1]"
export PATH="$PWD/.venv/bin:$PATH"
