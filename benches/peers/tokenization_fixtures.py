"""Writes crates/tokenization/tests/fixtures: small tokenizers, and transformers' tokens of texts and conversations.

    $PEER_PYTHON benches/peers/tokenization_fixtures.py

The tokenizers are trained here on this repository's own pages; the templates are written here, in the styles of four families.
"""
import json, shutil
from pathlib import Path
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "crates/tokenization/tests/fixtures"
PAGES = [str(ROOT / page) for page in ("ARCHITECTURE.md", "CONTRIBUTING.md")]
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN = LLAMA3.replace("{1,3}", "")

CHATML = """{%- for message in messages -%}
    {{- '<|im_start|>' + message['role'] + '\\n' -}}
    {%- if message['role'] == 'assistant' -%}
        {% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}
        {{- '\\n' -}}
    {%- else -%}
        {{- message.content | trim + '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
LLAMA = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MISTRAL = """{%- if messages[0]['role'] == 'system' %}
  {%- set system_message = messages[0]['content'] %}
  {%- set loop_messages = messages[1:] %}
{%- else %}
  {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
  {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
    {{- raise_exception('user and assistant must take turns') }}
  {%- endif %}
  {%- if message['role'] == 'user' %}
    {%- if loop.first and system_message is defined %}
      {{- '[INST] ' + system_message + '\\n\\n' + message['content'] + ' [/INST]' }}
    {%- else %}
      {{- '[INST] ' + message['content'] + ' [/INST]' }}
    {%- endif %}
  {%- else %}
    {{- ' ' + message['content'] + eos_token }}
  {%- endif %}
{%- endfor %}
"""
QWEN3 = """{%- if tools %}{{- tools | tojson }}{%- endif %}
{%- set ns = namespace(last=messages|length - 1, looking=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.looking and message.role == "user" and message.content is string and not (message.content.startswith('<tool>') and message.content.endswith('</tool>')) %}
        {%- set ns.looking = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}{%- else %}{%- set content = '' %}{%- endif %}
    {%- if message.role == "assistant" %}
        {%- set thoughts = '' %}
        {%- if '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}{% generation %}
        {%- if loop.index0 > ns.last and thoughts %}
            {{- '<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- if message.reasoning_content %}
            {{- '(' + message.reasoning_content + ')' }}
        {%- endif %}
        {%- if message.notes %}
            {{- message.notes | tojson }}
            {{- message.notes | tojson(ensure_ascii=True, sort_keys=True, separators=(',', ':')) }}
            {{- message | tojson(indent=1) }}
        {%- endif %}
        {{- '<|im_end|>' }}{% endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""


def byte_level(pattern, specials, normalizer=None):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizer
    split = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pattern)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split + [bytes_]) if split else bytes_
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train(PAGES, trainers.BpeTrainer(vocab_size=360, initial_alphabet=alphabet, special_tokens=specials, show_progress=False))
    return tokenizer


def metaspace(specials):
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.train(PAGES, trainers.BpeTrainer(vocab_size=480, special_tokens=specials + bytes_, limit_alphabet=90, show_progress=False))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in specials]
    return Tokenizer.from_str(json.dumps(state))


def tokenizers():
    chatml = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    llama = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    yield "chatml", byte_level(None, chatml), dict(eos_token="<|im_end|>", pad_token="<|endoftext|>"), CHATML
    yield "llama3", byte_level(LLAMA3, llama), dict(bos_token=llama[0], eos_token=llama[4]), LLAMA
    # As in Llama 3's: the tokenizer.json adds the first token, and no key of the configuration says so.
    adds = byte_level(LLAMA3, llama)
    single = "<|begin_of_text|> $A <|end_of_text|>"
    adds.post_processor = processors.TemplateProcessing(single=single, special_tokens=[(name, adds.token_to_id(name)) for name in llama[:2]])
    yield "llama3-adds", adds, dict(bos_token=llama[0], eos_token=llama[1]), LLAMA
    yield "mistral", metaspace(["<unk>", "<s>", "</s>"]), dict(bos_token="<s>", eos_token="</s>", unk_token="<unk>", add_bos_token=True), MISTRAL
    qwen = byte_level(QWEN, chatml, normalizers.NFC())
    qwen.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    yield "qwen3", qwen, dict(eos_token="<|im_end|>", pad_token="<|endoftext|>"), QWEN3


TEXTS = [
    "", " ", "Hello, world!", "  two  spaces\n\n\nand lines \n \t tabs\r\nend\n", "it's 12345.678 naïve e\u0301 🦀 数据\n",
    "def f(x):\n    return x + 1\nclass A:\n    pass\nb = 2\n", "<|im_start|>user<|eot_id|></s> <s>", "a\nb\n1\nc.\nd",
]
user, assistant, system = (lambda content, role=role, **more: dict(role=role, content=content, **more) for role in ("user", "assistant", "system"))
CHATS = [
    [user("Hi"), assistant("Hello! How are you?")],
    [system(" Be brief. "), user("What is 2 + 2?"), assistant("4"), user("And 3 + 3?\n"), assistant(" It's 6 🦀\n\nreally. ")],
    [user("Ünïcode?"), assistant("数据, naïve & <b>"), user("<|im_end|>"), assistant("\n")],
    [user("Null?", tool_calls=None), assistant("No.", reasoning=" since ", refusal=None, notes={"z": 1e16, "b": [1e-5, 0.1, [], {}], "a": "é\x7f🦀\n"})],
    [user("thoughts"), assistant("<think>\nwell\n</think>\n\nanswer", notes={"a": [1, 2.5, None, True], "é": "<"}), user("again"), assistant("<think>x</think>yes")],
]


def span_mask(encoding, spans):
    mask = [0] * len(encoding.input_ids)
    for start, end in spans:
        for at in range(encoding.char_to_token(start), encoding.char_to_token(end - 1) + 1):
            mask[at] = 1
    return mask


TOOLS = [{"type": "function", "function": {"name": "add", "strict": None, "parameters": {"properties": {"é": {}}}}}]


def chat(tokenizer, messages, blocks, tools=None):
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    if blocks:
        out = tokenizer.apply_chat_template(messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True)
        return dict(messages=messages, tools=tools, text=text, ids=out["input_ids"], mask=out["assistant_masks"])
    spans = []
    for at, message in enumerate(messages):
        if message["role"] == "assistant":
            before = tokenizer.apply_chat_template(messages[:at], tokenize=False, add_generation_prompt=True)
            spans.append((len(before), len(tokenizer.apply_chat_template(messages[: at + 1], tokenize=False))))
    encoding = tokenizer(text, add_special_tokens=False)
    assert encoding.input_ids == tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    return dict(messages=messages, text=text, ids=encoding.input_ids, mask=span_mask(encoding, spans))


def main():
    shutil.rmtree(OUT, ignore_errors=True)
    cases = {}
    for name, tokenizer, special, template in tokenizers():
        folder = OUT / name
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, clean_up_tokenization_spaces=False, **special)
        fast.save_pretrained(folder)
        if name == "chatml":  # Older models have their template here.
            (folder / "chat_template.jinja").unlink()
            config = json.loads((folder / "tokenizer_config.json").read_text())
            config["chat_template"] = [dict(name="tool_use", template="{{ x.y.z }}"), dict(name="default", template=template)]
            (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
        state = json.loads((folder / "tokenizer.json").read_text())
        (folder / "tokenizer.json").write_text(json.dumps(state, ensure_ascii=False, separators=(",", ":")))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        texts = [dict(text=text, ids=tokenizer(text, add_special_tokens=False).input_ids) for text in TEXTS]
        for case in texts:
            case["prompt"] = tokenizer(case["text"]).input_ids
            if case["prompt"][-1:] == [tokenizer.eos_token_id] and case["prompt"] != case["ids"]:
                case["prompt"].pop()  # The end token.
            case["decoded"] = tokenizer.decode(case["ids"], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        chats = [chat(tokenizer, messages, "{% generation %}" in template) for messages in CHATS]
        if name == "qwen3":
            chats.append(chat(tokenizer, CHATS[0], True, TOOLS))
        cases[name] = dict(vocab=len(tokenizer), end=tokenizer.eos_token_id, texts=texts, chats=chats)
    (OUT / "cases.json").write_text(json.dumps(cases, ensure_ascii=False, separators=(",", ":")) + "\n")
    (OUT / "README.md").write_text("Written by `benches/peers/tokenization_fixtures.py`: small tokenizers, and what transformers makes of\n`cases.json`'s texts and conversations with them.\n")


main()
