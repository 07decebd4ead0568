"""Tokenizers whose tokens are words, and pieces of words."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<s>", "</s>", "[MASK]", "[UNK]", "<extra_id_0>"]
CORPUS = "a the film plot is dull and long so good bad it Grade all in terrible great grading"


def word_tokenizer(mask: str | None = "[MASK]", around: bool = True) -> PreTrainedTokenizerFast:
    """One token for each word; `around`: as BERT's, with a token before the text and one behind."""
    vocabulary = {piece: i for i, piece in enumerate([*SPECIAL, *CORPUS.split(), "."])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if around:
        ends = [("<s>", 1), ("</s>", 2)]
        core.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    extra = {"mask_token": mask} if mask else {}
    special = {"pad_token": "<pad>", "unk_token": "[UNK]", "bos_token": "<s>", "eos_token": "</s>"}
    made = PreTrainedTokenizerFast(tokenizer_object=core, **special, **extra)
    made.add_special_tokens({"additional_special_tokens": ["<extra_id_0>"]})
    return made


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE as GPT-2's: a word has another token with a space before it, and words can merge."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<pad>", "<s>", "</s>"], initial_alphabet=alphabet)
    core.train_from_iterator([CORPUS, CORPUS.title()] * 20, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def spaced(words: list[str]) -> PreTrainedTokenizerFast:
    """One token for each word between spaces; the first of them is the padding, and the second the end."""
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    core.pre_tokenizer = pre_tokenizers.Split(pattern=" ", behavior="removed")
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token=words[0], eos_token=words[1])


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", "the", "film", "was"]


def tokenizer_of(words, **special):
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    if "cls_token" in special:
        ends = [("[CLS]", words.index("[CLS]")), ("[SEP]", words.index("[SEP]"))]
        inner.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]", **special)
