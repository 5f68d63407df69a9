"""Writes crates/trainer/tests/golden/prepare: the same documents as JSONL, compressed, and as parquet.

    python3 -m venv venv && venv/bin/pip install pyarrow && venv/bin/python benches/peers/prepare_fixtures.py
"""
import json
from pathlib import Path
import pyarrow as pa
import pyarrow.parquet as pq

OUT = Path(__file__).resolve().parents[2] / "crates/trainer/tests/golden/prepare"
TEXTS = ["Once upon a time.\n", "naïve 数据 🦀\n\nit's 12345\n", "def f(x):\n    return x\n" * 20]
CHATS = [[dict(role="user", content=text), dict(role="assistant", content=text[::-1])] for text in TEXTS]
OUT.mkdir(exist_ok=True)
for name, documents, compression in [("text", TEXTS, "snappy"), ("messages", CHATS, "zstd")]:
    rows = [{"id": at, name: document} for at, document in enumerate(documents)]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    (OUT / f"{name}.jsonl").write_bytes(lines)
    for end, codec in [("gz", "gzip"), ("zst", "zstd")]:
        with pa.CompressedOutputStream(str(OUT / f"{name}.jsonl.{end}"), codec) as file:
            file.write(lines)
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, OUT / f"{name}.parquet", compression=compression)
    pq.write_table(table, OUT / f"{name}.gzip.parquet", compression="gzip")
(OUT / "README.md").write_text("Written by `benches/peers/prepare_fixtures.py`: the same documents in all the forms that `prepare` reads.\n")
