"""H09: the same request in fresh processes, with freed memory scrambled: the same tokens and accepted counts."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import sys, specrun
engine = specrun.load(sys.argv[1], verify=False)
prompt = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]
result = engine.generate(prompt, specrun.SamplingParams(max_tokens=40, temperature=0.8, seed=9, ignore_eos=True))
print(result.drafter, result.token_ids)
"""


def test_fresh_processes_agree(tiny_bundle):
    outputs = set()
    for perturb in ("0", "85", "170", "255"):
        environment = os.environ | {"MALLOC_PERTURB_": perturb}
        command = [sys.executable, "-c", PROGRAM, str(tiny_bundle)]
        outputs.add(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert len(outputs) == 1 and "[" in outputs.pop()
