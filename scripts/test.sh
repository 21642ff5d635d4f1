#!/usr/bin/env bash
# Format, lint, types, imports, then the tests. Arguments go to pytest.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
.venv/bin/ruff format --check .
.venv/bin/ruff check .
.venv/bin/mypy
.venv/bin/lint-imports --no-logo --no-cache
.venv/bin/python -m pytest -n 2 --dist worksteal "$@"
