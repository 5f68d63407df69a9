"""Makes token files as `trainer prepare` does, with Hugging Face `datasets` and `tokenizers`, or measures the two in turns.

    python3 -m venv venv && venv/bin/pip install datasets tokenizers
    venv/bin/python benches/peers/prepare_datasets.py make WORK ROOT...   # WORK/text.jsonl from the texts below ROOTs, WORK/tokenizer.json
    venv/bin/python benches/peers/prepare_datasets.py encode WORK         # the run that `trainer prepare` is compared with
    venv/bin/python benches/peers/prepare_datasets.py compare WORK TRAINER [ROUNDS]
"""
import json, os, random, shutil, subprocess, sys, time
from pathlib import Path

BYTES, VOCAB, PROCESSES, SHARD = 60_000_000, 32_000, 2, 10_000_000
PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
ENDS = {".rs", ".py", ".md", ".txt", ".html", ".rst", ".c", ".h"}


def make(work, roots):
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    work.mkdir(exist_ok=True)
    files = sorted(file for root in roots for file in Path(root).rglob("*") if file.suffix in ENDS and file.is_file())
    random.Random(0).shuffle(files)
    texts, held = [], 0
    for file in files:
        try:
            text = file.read_text("utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if 0 < len(text) < 200_000:
            texts.append(text)
            held += len(text.encode())
        if held > BYTES:
            break
    (work / "text.jsonl").write_text("".join(json.dumps(dict(text=text), ensure_ascii=False) + "\n" for text in texts))
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False)
    tokenizer.train_from_iterator(texts[::4], trainer)
    tokenizer.save(str(work / "tokenizer.json"))
    print(f"{len(texts)} documents, {held / 1e6:.1f} MB")


def encode(work):
    """As nanoGPT's and most recipes do: `map` in batches and processes, then one array of u16 in shards."""
    import numpy as np
    from datasets import load_dataset
    from tokenizers import Tokenizer
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    end = tokenizer.token_to_id("<|endoftext|>")

    def tokens(batch):
        encoded = tokenizer.encode_batch_fast(batch["text"], add_special_tokens=False)
        ids = [encoding.ids + [end] for encoding in encoded]
        return dict(ids=ids, length=[len(document) for document in ids])

    cache = work / "cache"
    data = load_dataset("json", data_files=str(work / "text.jsonl"), split="train", cache_dir=str(cache))
    data = data.map(tokens, batched=True, remove_columns=["text"], num_proc=PROCESSES)
    held, shard, total = [], 0, 0
    out = work / "peer"
    out.mkdir()
    for batch in data.with_format("numpy").iter(1000):
        held.append(np.concatenate(batch["ids"]).astype(np.uint16))
        total += held[-1].size
        while sum(part.size for part in held) >= SHARD:
            joined = np.concatenate(held)
            joined[:SHARD].tofile(out / f"{shard:05}.bin")
            held, shard = [joined[SHARD:]], shard + 1
    np.concatenate(held).tofile(out / f"{shard:05}.bin")
    print(total, "tokens")


def compare(work, trainer, rounds=5):
    import numpy as np
    environment = dict(os.environ, TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", HF_DATASETS_DISABLE_PROGRESS_BARS="1")
    peer = [sys.executable, __file__, "encode", str(work)]
    ours = [trainer, "prepare", str(work / "text.jsonl"), "--out", str(work / "ours"), "--tokenizer", str(work / "tokenizer.json")]
    ours += ["--shard-tokens", str(SHARD), "--threads", str(PROCESSES), "--quiet"]
    size, ratios = (work / "text.jsonl").stat().st_size / 1e6, []
    for turn in range(rounds):
        took = {}
        # They take turns at going first, so that neither always has the warmer machine.
        for name, command in sorted(dict(ours=ours, peer=peer).items(), reverse=turn % 2):
            for folder in ("cache", name):
                shutil.rmtree(work / folder, ignore_errors=True)
            began = time.perf_counter()
            subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
            took[name] = time.perf_counter() - began
        ratios.append(took["peer"] / took["ours"])
        print(f"round {turn}: ours {took['ours']:.2f} s ({size / took['ours']:.1f} MB/s), peer {took['peer']:.2f} s, {ratios[-1]:.2f} times", flush=True)
    tokens = lambda folder, pattern, header: np.concatenate([np.fromfile(file, np.uint16)[header:] for file in sorted((work / folder).glob(pattern))])
    assert np.array_equal(tokens("ours", "train-*.bin", 512), tokens("peer", "*.bin", 0)), "the tokens differ"
    print(f"the same tokens; {sorted(ratios)[len(ratios) // 2]:.2f} times as fast (median; {min(ratios):.2f} to {max(ratios):.2f})")


command, work, *rest = sys.argv[1:]
work = Path(work)
if command == "make":
    make(work, rest)
elif command == "encode":
    encode(work)
else:
    compare(work, rest[0], int(rest[1]) if rest[1:] else 5)
