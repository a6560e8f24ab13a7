"""Quantizes in forked children that kill themselves with SIGKILL at a given progress event, then once to the end.

    python kill_driver.py MODEL OUT TEXT METHOD EFFORT BUDGET EVENT [EVENT ...]

METHOD may also be a JSON object, of fields of the recipe. Prints one JSON object: how each child ended, and how many
layers the last run took from the journal (null: the last child had ended the work).
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch

from cann_llm_quant.pipeline import Event, RunOptions, quantize_model
from cann_llm_quant.recipe import Calibration, Recipe


def main() -> None:
    model, out, text, method, effort, budget, *points = sys.argv[1:]
    torch.set_num_threads(1)
    calibration = Calibration(data=(text,), samples=6, length=32)
    fields = json.loads(method) if method.startswith("{") else {"method": method}
    fields |= {"effort": effort, "tuning_steps": 4 if effort == "best" else 0, "calibration": calibration}
    recipe = Recipe.model_validate(fields)
    options = RunOptions(activation_budget=int(budget))
    endings = []
    for point in points:
        child = os.fork()
        if child == 0:
            seen = 0

            def die(event: Event, at: int = int(point)) -> None:
                nonlocal seen
                seen += 1
                if seen == at:
                    os.kill(os.getpid(), signal.SIGKILL)

            quantize_model(model, Path(out), recipe, options=options, progress=die)
            os._exit(0)
        endings.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        if endings[-1] == 0:  # a resumed run has fewer events and may end before its point
            break
    resumed = None
    if not Path(out).exists():
        resumed = quantize_model(model, Path(out), recipe, options=options).resumed_layers
    print(json.dumps({"endings": endings, "resumed": resumed}))


main()
