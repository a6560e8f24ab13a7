"""Files that travel with the weights unchanged: tokenizer, chat templates, generation config, licence, model card.

They are copied byte for byte, never parsed and written again: libraries rewrite tokenizer files into forms that other
versions cannot load. Code (`.py`) is never among them.
"""

from fnmatch import fnmatchcase
from pathlib import Path

from cann_llm_quant.checkpoint.files import file_names, read_bytes

_PATTERNS = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.jinja",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "LICENSE*",
    "LICENCE*",
    "NOTICE*",
    "README.md",
)
_NEVER = (".py", ".pyc", ".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json", ".zip", ".exe", ".so", ".tmp")
_TEMPLATE_FOLDER = "additional_chat_templates"


def is_companion(name: str) -> bool:
    """Whether a file of this name in a model folder travels with the weights."""
    wanted = any(fnmatchcase(name, pattern) for pattern in _PATTERNS)
    return wanted and not name.lower().endswith(_NEVER) and _is_portable(name)


def _is_portable(name: str) -> bool:
    """Whether the name means one file on every system; elsewhere a backslash would lead into another folder."""
    return "\\" not in name


def companion_files(folder: Path) -> dict[str, bytes]:
    """Companion files of `folder` by relative name with `/`, in order of their names. Raises CheckpointError."""
    found = [name for name in file_names(folder) if is_companion(name)]
    templates = folder / _TEMPLATE_FOLDER
    if templates.is_dir():
        found += [
            f"{_TEMPLATE_FOLDER}/{name}"
            for name in file_names(templates)
            if name.endswith(".jinja") and _is_portable(name)
        ]
    return {name: read_bytes(folder / name) for name in sorted(found)}
