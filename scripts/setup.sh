# Makes the virtual environment .venv beside this project, with lockstep and what its tests need. Sourced by the others.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ ! -x .venv/bin/python ]; then
    "${PYTHON:-python3}" -m venv .venv
fi
stamp=.venv/lockstep-installed
if [ ! -e "$stamp" ] || [ pyproject.toml -nt "$stamp" ] || [ constraints.txt -nt "$stamp" ]; then
    echo "installing lockstep into .venv (about a minute)"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test]"
    touch "$stamp"
fi
