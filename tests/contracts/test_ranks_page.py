"""What docs/ranks.md shows is what happens."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "ranks.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", PAGE, re.DOTALL)


@pytest.mark.parametrize(("code", "output"), SNIPPETS, ids=range(len(SNIPPETS)))
def test_a_snippet_prints_what_the_page_says(tmp_path: Path, code: str, output: str) -> None:
    file = tmp_path / "snippet.py"
    file.write_text(code)
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=120, env=os.environ)
    assert done.returncode == 0, done.stderr
    if output:
        assert done.stdout == output
    else:
        assert [line.split()[0] for line in done.stdout.splitlines()] == ["seconds", "collect", "communicate"]


def test_every_piece_is_on_the_page() -> None:
    from lockstep.ranks import Ranks

    public = {name for name in vars(Ranks) if not name.startswith("_")} - {"leave"}
    assert {name for name in public if name not in PAGE} == set()
