"""KL of every method on the small trained models: which method wins where, experts and q/k norms included.

    python benchmarks/small_models.py MODELS_FOLDER CALIBRATION_TEXT EVALUATION_TEXT [--model NAME] [--bits 4]

Each model is quantized by each method with the same 32 windows of 256 tokens and the automatic group size, symmetric,
and evaluated against its float self on 16 windows. Prints one Markdown row a model, and how many linears were worse
than plain rounding (there should be none). --model and --bits may be repeated.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

METHODS = {
    "rtn": ["--method", "rtn"],
    "awq": ["--method", "awq"],
    "gptq fast": ["--method", "gptq", "--effort", "fast"],
    "gptq balanced": ["--method", "gptq"],
    "gptq best": ["--method", "gptq", "--effort", "best"],
    "awq+gptq best": ["--method", "awq+gptq", "--effort", "best"],
}
NAMES = (
    "stories260k",
    "stories260k-qwen2",
    "stories260k-mixtral",
    "s260k-qwen2",
    "s260k-qwen3",
    "s260k-qwen3_moe",
)


def run(*arguments: str) -> dict[str, Any]:
    """One command of the tool, its JSON result."""
    command = [sys.executable, "-m", "cann_llm_quant", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, encoding="utf-8")
    return dict(json.loads(done.stdout))


def measure(
    model: Path, calibration: str, evaluation: str, bits: int, method: list[str], out: Path
) -> tuple[float, int]:
    """KL against the float model, and the number of linears that lost more than plain rounding."""
    text = ["--data", calibration, "--samples", "32", "--seq-len", "256"]
    run("quantize", str(model), "-o", str(out), "--bits", str(bits), *text, *method)
    found = run("perplexity", str(out), "--reference", str(model), "--data", evaluation, "--max-windows", "16")
    linears = json.loads((out / "inference_config.json").read_text(encoding="utf-8"))["linears"].values()
    errors = [(entry["error"], entry["rtn_error"]) for entry in linears if entry["error"] is not None]
    return float(found["divergence"]["kl"]), sum(error > plain for error, plain in errors)


def main() -> None:
    """Measure and print the table, row by row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path)
    parser.add_argument("calibration")
    parser.add_argument("evaluation")
    parser.add_argument("--model", action="append", default=None)
    parser.add_argument("--bits", type=int, action="append", default=None)
    arguments = parser.parse_args()
    print(
        f"| model | {' | '.join(METHODS)} | worse than rounding |",
        "|---" * (len(METHODS) + 2) + "|",
        sep="\n",
        flush=True,
    )
    for bits in arguments.bits or [4]:
        for name in arguments.model or NAMES:
            cells, worse = [], 0
            for method in METHODS.values():
                with tempfile.TemporaryDirectory() as folder:
                    place = Path(folder) / "out"
                    kl, lost = measure(
                        arguments.models / name, arguments.calibration, arguments.evaluation, bits, method, place
                    )
                cells.append(f"{kl:.4f}")
                worse += lost
            print(f"| {name}, {bits} bits | {' | '.join(cells)} | {worse} |", flush=True)


main()
