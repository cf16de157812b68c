#!/bin/sh
# make_venv.sh FOLDER: a virtual environment with the first Python that is new enough.
# PYTHON=... names one to use.
set -eu
folder=$1
for python in ${PYTHON:-} python3 python3.13 python3.12 python3.11; do
    # A name may be a shim that finds nothing, so the program is run, not only looked for.
    if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        "$python" -m venv "$folder" || {
            echo "$python cannot make virtual environments: on Debian or Ubuntu, 'apt install python3-venv'" >&2
            exit 1
        }
        exit 0
    fi
done
found=$(python3 --version 2>/dev/null || echo "no python3")
echo "dflash-rag needs Python 3.11 or newer; found: $found." >&2
echo "Install one: macOS 'brew install python@3.12', Debian or Ubuntu 'apt install python3.12 python3.12-venv'," >&2
echo "or name one: make PYTHON=/path/to/python3.12" >&2
exit 1
