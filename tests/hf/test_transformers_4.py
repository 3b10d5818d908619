"""If this fails, RingFA3 does not work with transformers 4. tests/hf/test_models.py with
transformers 4.57.6, the oldest that `ringfa3[hf]` allows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.markdown import ROOT

# transformers 4 computes the experts of DeepSeek-V3 in float32 only, and its BERT takes no
# attention function but its own.
NOT_IN_4 = "not (deepseek-v3 and float64) and not encoder"


@pytest.mark.soak
def test_models(tmp_path: Path) -> None:
    """In a process whose first path is a folder with transformers 4.57.6 and what it needs."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(tmp_path)]
    subprocess.run([*pip, "transformers==4.57.6"], check=True, timeout=300)
    path = os.pathsep.join((str(tmp_path), str(ROOT)))
    code = (
        "import sys, pytest, transformers; assert transformers.__version__ == '4.57.6';"
        "sys.exit(pytest.main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "-p", "no:xdist", "tests/hf/test_models.py", "-k", NOT_IN_4],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
