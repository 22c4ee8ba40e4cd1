"""Text and a tokenizer for the scripts beside: sentences made of a few words, with a topic, and a tag for each word."""

import random

from datasets import Dataset, DatasetDict
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

TOPICS = {
    "weather": ["rain", "sun", "cloud", "storm", "wind", "snow"],
    "kitchen": ["bread", "salt", "oven", "soup", "knife", "plate"],
    "street": ["car", "tram", "light", "corner", "bus", "lamp"],
}
FILLERS = ["the", "a", "and", "of", "in", "on", "with", "near"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TAGS = ["O", *TOPICS]


def sentence(rng, topic):
    words, tags = [], []
    for _ in range(rng.randint(4, 14)):
        is_topic = rng.random() < 0.5
        words.append(rng.choice(TOPICS[topic] if is_topic else FILLERS))
        tags.append(TAGS.index(topic) if is_topic else 0)
    return words, tags


def make_split(samples, seed):
    rng = random.Random(seed)
    rows = {"text": [], "label": [], "tokens": [], "ner_tags": []}
    for _ in range(samples):
        topic = rng.choice(sorted(TOPICS))
        words, tags = sentence(rng, topic)
        rows["text"].append(" ".join(words))
        rows["label"].append(sorted(TOPICS).index(topic))
        rows["tokens"].append(words)
        rows["ner_tags"].append(tags)
    return Dataset.from_dict(rows)


def load_words(train=96, validation=30):
    """As `datasets.load_dataset` would give it."""
    return DatasetDict(train=make_split(train, 1), validation=make_split(validation, 2))


def load_tokenizer():
    """As `AutoTokenizer.from_pretrained` would give it."""
    words = SPECIAL + FILLERS + [word for topic in TOPICS.values() for word in topic]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=32,
    )
