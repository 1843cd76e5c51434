"""Times tokenizing text to shards on one core, beside only the tokenizer's library on the same text.

    python -m bench.training.tokenize --tokenizer tokenizer.json --paths FILE.jsonl [--rounds 7] [--json FILE]

Both take turns. The library gets the documents in its best form: decoded, in memory, in batches of 4 MB, with
its own threads off. Ours reads the files, parses, hashes, tokenizes, and writes shards to the disk. If the
files hold conversations, it also renders them by --chat-template and finds what is learned; the library gets
what was rendered. "of the library" is the library's time divided by ours.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

from bench.common.measuring import facts, interleave, parser_of, write_json
from bench.common.tables import table
from pyruntime.train.data import tokenizing
from pyruntime.train.data.conversations import ChatEncoder
from pyruntime.train.data.documents import documents, survey, units
from pyruntime.train.data.tokenizer import JsonTokenizer


def main() -> None:
    parser = parser_of(__doc__, rounds=7)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--paths", nargs="+", required=True)
    parser.add_argument("--field", default="text")
    parser.add_argument("--chat-template", default="", help="file; default: that beside the tokenizer")
    args = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = JsonTokenizer(Path(args.tokenizer))
    sources, skipped = survey(args.paths, "*")
    encoder = tokenizing.encoder_of(sources, tokenizer, args.chat_template, "all")
    found = [document for unit in units(sources) for document in _texts(sources, unit, args.field)]
    if isinstance(encoder, ChatEncoder):
        found = [encoder.rendered(json.loads(each))[0] for each in found]
    batches, size = _batches(found), sum(len(text.encode()) for text in found)
    folder = Path(tempfile.mkdtemp())
    tokenizing.SMALL_BYTES = 2**62  # in this process

    def ours() -> None:
        shutil.rmtree(folder)
        folder.mkdir()
        tokenizing.write(folder, sources, skipped, encoder, args.field)

    def library() -> None:
        for batch in batches:
            tokenizer._engine.encode_batch_fast(batch, add_special_tokens=False)

    try:
        samples = interleave({"pyruntime": ours, "tokenizers": library}, args.rounds)
    finally:
        shutil.rmtree(folder)
    ratio = samples["tokenizers"].over(samples["pyruntime"])
    where = facts()
    lines = [
        {
            "name": name,
            "seconds": sample.median,
            "spread": sample.spread,
            "mb_per_second": size / sample.median / 1e6,
        }
        for name, sample in samples.items()
    ]
    print(where["machine"])
    print(f"{size / 1e6:.1f} MB of text in {len(found):,} documents, one core\n")
    rows = [[line["name"], f"{line['mb_per_second']:.2f}", f"{line['spread']:.1%}"] for line in lines]
    print(table(["", "MB/s", "+-"], rows))
    print(f"of the library: {ratio.median:.2f}")
    if args.json:
        write_json(args.json, where, vars(args), [*lines, {"name": "of the library", "ratio": ratio.median}])


def _texts(sources, unit, field: str) -> list[str]:
    return [
        b"".join(document.pieces).decode("utf-8", errors="backslashreplace")
        for document in documents(sources, unit, field)
    ]


def _batches(texts: list[str]) -> list[list[str]]:
    batches: list[list[str]] = [[]]
    size = 0
    for text in texts:
        if size >= tokenizing.BATCH_BYTES:
            batches.append([])
            size = 0
        batches[-1].append(text)
        size += len(text)
    return batches


if __name__ == "__main__":
    main()
