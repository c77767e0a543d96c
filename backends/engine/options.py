"""What an operator can set of an engine, each said once: flags, fields of the backends file and docs come from here.

Torch-free, so that the command line and the backends file can be read without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from backends.engine.config import PREFIX_CACHES

_ABOUT = "about"
MOST_TOKENS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class About:
    """What there is to say of an option. ``flag``: of commands, "" for none; ``in_file``: the backends file has it too.

    The values are one of ``choices`` (in the file also ``indexed``: one of them with a number, such as "cuda:1"), a
    whole number within ``limits``, yes or no (``switch``), or else text; ``metavar`` is what help calls them.
    """

    help: str
    flag: str = ""
    in_file: bool = True
    choices: tuple[str, ...] = ()
    indexed: str = ""
    limits: tuple[int, int] | None = None
    switch: bool = False
    metavar: str = "DIR_OR_ID"


def _option(default: Any, about: About) -> Any:
    return field(default=default, metadata={_ABOUT: about})


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """``model`` None: the demo model; "tiny-random": a random one, for tests. Elsewhere None, and "auto": chosen when
    the model is loaded. ``tiny_tokenizer``: the random model's, of :data:`backends.models.tiny.TINY_TOKENIZERS`.
    """

    model: str | None = _option(None, About("local folder or hub id; default: the demo model", "--model"))
    heads: str | None = _option(None, About("Medusa heads; default: those that belong to the model", "--heads"))
    device: str = _option(
        "auto", About("default: %(default)s", "--device", choices=("auto", "cpu", "cuda"), indexed="cuda")
    )
    dtype: str = _option("auto", About("default: %(default)s", "--dtype", choices=("auto", "bfloat16", "float32")))
    max_model_len: int | None = _option(
        None,
        About("context window; default: the model's", "--max-model-len", limits=(1, MOST_TOKENS), metavar="TOKENS"),
    )
    max_running: int | None = _option(
        None,
        About(
            "sequences decoded at once; default: the engine's choice",
            "--max-running",
            limits=(1, MOST_TOKENS),
            metavar="N",
        ),
    )
    served_name: str | None = _option(
        None,
        About(
            "what clients ask for; default: the model's own name", "--served-model-name", in_file=False, metavar="NAME"
        ),
    )
    kv_tokens: int | None = _option(
        None,
        About("size of the KV cache; default: by memory", "--kv-tokens", limits=(1, MOST_TOKENS), metavar="TOKENS"),
    )
    runner: str = _option(
        "auto",
        About("default: %(default)s", "--runner", in_file=False, choices=("auto", "native", "triton", "transformers")),
    )
    threads: int | None = _option(
        None, About("CPU threads; default: the cores, shared evenly by the file's CPU engines", limits=(1, 1024))
    )
    quantize: str | None = _option(
        None,
        About(
            "weights of the linear layers (int4: with --dtype bfloat16); default: as they are",
            "--quantize",
            choices=("int8", "int4"),
        ),
    )
    prefix_cache: str = _option(
        "tenant",
        About(
            "prompts that begin alike share what is computed of them: within an API key, between all, or not at all; "
            "default: %(default)s",
            "--prefix-cache",
            choices=PREFIX_CACHES,
        ),
    )
    measure_anew: bool = _option(
        False,
        About(
            "measure what steps cost at the start even if that is known from an earlier one (MEDUSA_REMEASURE=1)",
            "--remeasure",
            in_file=False,
            switch=True,
        ),
    )
    tiny_tokenizer: str = "byte-level"


ABOUT: Mapping[str, About] = {each.name: each.metadata[_ABOUT] for each in fields(EngineOptions) if each.metadata}
"""By name, in the order of :class:`EngineOptions`."""

DEFAULTS: Mapping[str, Any] = {each.name: each.default for each in fields(EngineOptions)}
