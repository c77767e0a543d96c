"""The same weights in the peers' formats, made from the demo model's GGUF file once and kept in the cache."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from backends.models.demo import find_demo_gguf, sha256_of

SHIPPED = "Q4_1"
"""What the demo model's package holds; the others are made of it, so that they hold the same numbers, rounded."""


def gguf_file(kind: str, folder: Path) -> Path:
    """The demo model as GGUF with ``kind`` ("BF16", "F16", "Q8_0", "Q4_1") matrices, in ``folder``.

    Norms stay float32. Raises :class:`backends.models.demo.DemoModelError` without the demo model's package.
    """
    source = find_demo_gguf()
    if kind == SHIPPED:
        return source
    path = folder / f"{source.stem.rpartition('.')[0]}-{sha256_of(source)[:12]}.{kind}.gguf"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=folder, suffix=".part")
        os.close(descriptor)
        try:
            _rewrite(source, Path(name), kind)
            os.replace(name, path)
        finally:
            Path(name).unlink(missing_ok=True)
    return path


def _rewrite(source: Path, path: Path, kind: str) -> None:
    import gguf
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter

    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(path, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        value = field.contents()
        if field.name == "general.file_type":
            value = int(getattr(gguf.LlamaFileType, f"MOSTLY_{kind}"))
        of_items = field.types[1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, value, field.types[0], sub_type=of_items)
    wanted = GGMLQuantizationType[kind]
    for tensor in reader.tensors:
        data = gguf.dequantize(tensor.data, tensor.tensor_type)
        if data.ndim < 2:
            writer.add_tensor(tensor.name, data)
        else:
            writer.add_tensor(tensor.name, gguf.quantize(data, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
