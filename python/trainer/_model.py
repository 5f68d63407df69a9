"""A model that is trained in this process, a step at a time."""
import os

from . import _trainer
from ._errors import UsageError
from ._flags import flags_of


class Trainer:
    """A model with its optimizer in this process: your batches, our memory, planned to the byte before it is taken.

        from trainer import Trainer
        with Trainer(init_from="Qwen3-0.6B", seq=512, micro_batch=4, lr=1e-5) as trainer:
            for batch in loader:
                print(trainer.step(batch["input_ids"], batch["labels"])["loss"])
            trainer.export("trained")

    Keywords are flags of `trainer train`: `config` is a preset or a TOML file, `init_from` a folder in Hugging Face layout, `lora` a rank,
    `lora_from` a folder of adapters, `device` cpu or cuda, and so on; `set=["a.b=1"]` sets any key. `micro_batch`, `accum` and `seq` are the largest
    that will come: a step has at most micro_batch * accum rows of seq tokens. `steps` is the length of the schedule of learning rates.
    `generate=(texts, tokens)` plans texts that `generate` makes together, and the most tokens of each, prompt included.

    Calls may come from any thread; they are made one after the other, and without the interpreter's lock. Ctrl-C breaks a step off, of which
    nothing is left; one that is made by then is in `metrics`. A forked process has to make a trainer of its own.
    """

    def __init__(self, *, generate=None, **flags):
        self._model = _trainer.PythonTrainer(list(flags_of(flags)), None if generate is None else tuple(generate))

    def plan(self):
        """The plan of a step, as `trainer plan --json` prints it."""
        return self._model.plan()

    def config(self):
        """The configuration with everything decided that was left open, as TOML."""
        return self._model.config()

    @property
    def metrics(self):
        """The records of the steps so far, as `metrics.jsonl` has them. Clear the list where it grows too long."""
        return self._model.metrics()

    @property
    def steps(self):
        """Steps made, those before a checkpoint that was loaded included."""
        return self._model.steps()

    def step(self, input_ids, labels, positions=None):
        """Makes a training step: forward and backward passes of all micro-batches, then the update. Returns its record, as `metrics.jsonl`
        has it: step, loss, grad_norm, lr, peak_bytes, planned_peak_bytes and more.

        `input_ids` and `labels` are whole numbers [rows, tokens], of NumPy, torch, lists of lists, or anything with the buffer protocol or
        DLPack on the CPU; they are copied. The loss is the mean over all labels of the step that are not -100, however the rows are divided into
        micro-batches. Labels stand at their own tokens, as in transformers: the label of a token is wanted at the token before. So rows have up
        to seq + 1 tokens, of which the last is a label alone, as the command takes them from a file. Rows may be fewer, and shorter; with
        packing="pad" shorter ones take less time and memory.

        `positions` [rows, tokens] begin at 0 with each document, where rows have several: make the trainer with packing="first-fit".
        """
        return self._model.step(input_ids, labels, positions)

    def eval(self, input_ids, labels, positions=None):
        """The mean loss over all labels of what `step` takes, without training."""
        return self._model.eval(input_ids, labels, positions)

    def log_probs(self, ids, *, reference=False):
        """The log-probability of each token after those before it, [rows, tokens] of f32, 0 at the first of each row; without training, and without
        keeping logits. With `reference` it is that of the model under the adapters. There may be any number of rows. It is a memoryview:
        `numpy.asarray` takes it in place, and `tolist()` makes lists.
        """
        values, shape = self._model.log_probs(ids, reference)
        return memoryview(values).cast("f", list(shape))

    def policy_step(self, ids, mask, advantages, old_log_probs, reference_log_probs=None, *, clip=0.2, beta=0.0, loss="grpo",
                    max_completion_length=None):
        """Makes a training step on a policy gradient, of texts that the model wrote and you judged: make the trainer with objective="policy".
        Returns its record, with loss, policy_kl and policy_clip_share.

        All of these are [rows, tokens] at their own tokens, as `log_probs` gives them: `ids`, prompts and texts; `mask`, 1 at tokens that the policy
        wrote, else 0; `advantages`, by how much each was better than expected, or one for each row; `old_log_probs` when they were written. `clip`
        is how far the ratio of new to old probability may be from 1, or a pair for below and above. `beta` is the factor on the distance from the
        reference, whose `reference_log_probs` are those of the model under the adapters where you give none.

        `loss` as TRL has it: "grpo", the mean over rows of each row's mean; "dr_grpo", the sum over tokens divided by rows and
        `max_completion_length`; "gspo", as "grpo" with one ratio for each row; "ppo", the mean over all tokens. Rows of all micro-batches have one loss.
        """
        low, high = clip if isinstance(clip, (list, tuple)) else (clip, clip)
        return self._model.policy_step(ids, mask, advantages, old_log_probs, reference_log_probs, (float(low), float(high)),
                                         float(beta), loss, max_completion_length or 0)

    def generate(self, prompts, max_tokens, *, temperature=1.0, top_k=None, top_p=1.0, seed=0, ends=None):
        """Continues prompts, lists of tokens, by at most `max_tokens` tokens each. Returns the new tokens of each, without the one that ended it.

        With temperature 0 the likeliest token is always taken. `top_k` and `top_p` limit the draw to the likeliest tokens. `ends` are tokens that end
        a text; by default those that the model's folder names. What a text draws depends on `seed` and its place among the prompts.
        """
        prompts = [[int(token) for token in prompt] for prompt in prompts]
        made = self._model.generate(prompts, max_tokens, ends, (temperature, top_k, top_p, seed))
        return [tokens for tokens, _ in made]

    def state(self):
        """The weights by name, as in Hugging Face's files, or as PEFT's those of adapters. `torch.from_dlpack(weight)` is a view where
        `weight.is_view`, and `weight.numpy()` a view of f32 on the CPU, else a copy. Views show what later steps change, and must not be written.
        """
        return self._model.state()

    def save(self, run):
        """Writes a checkpoint, RUN/checkpoints/step-N, with weights, optimizer states and counters, and returns its folder. `load` goes on from it,
        and so does `trainer --resume`, which reads the data that --data names from the beginning. It has the model in Hugging Face layout too.
        """
        return str(self._model.save(os.fspath(run)))

    def export(self, folder):
        """Writes the model in Hugging Face layout, or its adapters as PEFT reads them."""
        self._model.export(os.fspath(folder))

    def load(self, folder):
        """Goes on from a checkpoint, or the newest one of a run, also of the command's. Of a folder in Hugging Face layout, or PEFT's, it takes the
        weights alone.
        """
        self._model.load(os.fspath(folder))

    def sleep(self, level=1):
        """Gives all memory of the device back, for another program on the same GPU; on a GPU the context and the kernels stay. Level 1 keeps weights and
        states in host memory, pinned where there is a GPU; level 2 keeps nothing, because the last checkpoint of `save` or `load` has it all, and is
        refused if a step came after it. Returns given_back_bytes, kept_on_host_bytes, held_bytes and, on a GPU, device_used_bytes, which is
        what all processes use. Until `wake`, other calls are refused.
        """
        if level not in (1, 2):
            raise UsageError(f"level is {level}; it is 1, which keeps all in host memory, or 2, which keeps what a checkpoint has", 2)
        return self._model.sleep(level == 1)

    def wake(self):
        """Takes the planned memory again, and goes on as if it had never slept, with the same bits. If memory is refused, `OutOfMemory` says what is
        missing, everything is kept, and it can be called again.
        """
        self._model.wake()

    def close(self):
        """Gives all memory back, or what has views with the last of them. The trainer takes no more calls."""
        self._model.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
