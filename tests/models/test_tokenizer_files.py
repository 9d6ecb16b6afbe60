"""The tokenizer and the chat template of a checkpoint are read from its files as transformers reads them."""

import json

import pytest
from media_files import parity
from tokenizers.processors import TemplateProcessing

from models.processing import Processor, PromptError, tiny
from models.processing.settings import PatchLayout

LAYOUT = PatchLayout(patch_size=4, window_size=16)
TEXTS = ["abcdefghijklmnopqrstuvwxyz <|>/?!\n\\,:{}[]\"'_01"]
BOS, EOS = "<|im_start|>", "<|im_end|>"
TURN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
PROMPT = "which way does it go, and how far is it?"


@pytest.fixture
def folder(tmp_path):
    tiny.build(TEXTS, ["user"]).save(tmp_path)
    return tmp_path


@pytest.fixture
def transformers():
    return parity("transformers")


def change(file, **values):
    """Puts fields into a JSON file, and takes those away whose value is None."""
    fields = (json.loads(file.read_text()) if file.exists() else {}) | values
    file.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))


def stored(folder, **settings):
    """The processor of a folder whose tokenizer.json has been given these settings of the library's."""
    processor = tiny.build(TEXTS, ["user"])
    for name, values in settings.items():
        if name == "post_processor":
            processor.tokenizer.post_processor = values
        else:
            getattr(processor.tokenizer, name)(**values)
    processor.tokenizer.save(str(folder / "tokenizer.json"))


def about(bos=True, eos=False):
    vocabulary = tiny.build(TEXTS, ["user"]).tokenizer
    ends = [(token, vocabulary.token_to_id(token)) for token in (BOS, EOS)]
    return TemplateProcessing(single=[*[BOS] * bos, "$A", *[EOS] * eos], special_tokens=ends)


@pytest.mark.parametrize(
    "settings",
    [
        {"enable_truncation": {"max_length": 5}},
        {"enable_truncation": {"max_length": 9, "direction": "left", "stride": 2}},
        {"enable_padding": {"length": 90, "pad_token": "<|endoftext|>"}},
        {"enable_padding": {"pad_to_multiple_of": 64, "direction": "left"}},
        {"enable_truncation": {"max_length": 12}, "enable_padding": {"length": 12}},
    ],
    ids=lambda settings: "-".join(f"{name}{sorted(values.items())}" for name, values in settings.items()),
)
def test_stored_truncation_and_padding_do_not_touch_a_prompt(folder, transformers, settings):
    plain = Processor.load(folder).tokenise(PROMPT)
    stored(folder, **settings)
    loaded = Processor.load(folder)
    assert loaded.tokenise(PROMPT) == plain and len(plain) == len(PROMPT)
    assert plain == transformers.AutoTokenizer.from_pretrained(folder)(PROMPT)["input_ids"]
    loaded.save(folder / "again")
    file = json.loads((folder / "again/tokenizer.json").read_text())
    assert file["truncation"] is None and file["padding"] is None, "an export does not pass them on"


@pytest.mark.parametrize("template", [TURN, "{{ bos_token }}" + TURN, "{% if bos_token %}x{% endif %}" + TURN])
@pytest.mark.parametrize("ends", [(True, False), (False, True), (True, True), (False, False)])
def test_first_and_last_tokens_are_written_once(folder, transformers, template, ends):
    stored(folder, post_processor=about(*ends))
    change(folder / "tokenizer_config.json", bos_token=BOS, eos_token=EOS)
    (folder / "chat_template.jinja").write_text(template)
    processor, reference = Processor.load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    assert processor.tokenise(PROMPT) == reference(PROMPT)["input_ids"]
    conversation = [{"role": "user", "content": PROMPT}]
    expected = reference.apply_chat_template(conversation, add_generation_prompt=True)["input_ids"]
    assert processor.tokenise_chat(PROMPT) == expected
    assert expected.count(processor.tokenizer.token_to_id(BOS)) == template.count("{{ bos_token }}")
    answer = processor.encode("left")
    assert len(answer) == 4, "what comes behind a prompt begins no text"


def test_a_template_that_writes_no_first_token_leaves_it_to_the_processor_of_pictures(folder):
    """transformers' processors go another way than its tokenizers."""
    tiny.build(TEXTS, ["user"], layout=LAYOUT).save(folder)
    stored(folder, post_processor=about())
    change(folder / "tokenizer_config.json", bos_token=BOS)
    for template in (TURN, "{{ bos_token }}" + TURN):
        (folder / "chat_template.jinja").write_text(template)
        ids = Processor.load(folder).tokenise_chat(PROMPT)
        assert (ids[0], ids.count(1)) == (1, 1)


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("written", [True, False])
def test_what_tokenizer_json_puts_about_texts_goes_before_the_settings(folder, transformers, bos, written):
    if written:
        stored(folder, post_processor=about())
    change(folder / "tokenizer_config.json", add_bos_token=bos, bos_token=BOS)
    ids = Processor.load(folder).tokenise(PROMPT)
    assert (ids[0] == 1) == written
    assert ids == transformers.AutoTokenizer.from_pretrained(folder)(PROMPT)["input_ids"]


@pytest.mark.parametrize("entry", [EOS, {"content": EOS, "lstrip": False, "normalized": False, "rstrip": False}])
@pytest.mark.parametrize("said", [None, "<|endoftext|>"])
def test_end_ids_of_the_special_tokens_map(folder, transformers, entry, said):
    (folder / "generation_config.json").unlink()
    change(folder / "special_tokens_map.json", eos_token=entry, bos_token=BOS)
    change(folder / "tokenizer_config.json", eos_token=said)
    (folder / "chat_template.jinja").write_text("{{ bos_token }}{{ eos_token }}")
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    processor = Processor.load(folder)
    assert processor.eos_ids == (2,) == (reference.eos_token_id,)
    assert processor.tokenise_chat("") == [1, 2]
    processor.save(folder / "again")
    assert Processor.load(folder / "again").tokenise_chat("") == [1, 2]

    change(folder / "tokenizer_config.json", added_tokens_decoder={}, eos_token="<|endoftext|>")  # newer: not read
    assert transformers.AutoTokenizer.from_pretrained(folder).eos_token_id == 0
    assert Processor.load(folder).eos_ids == (0,)


ANSWER, THINK = "<answer>", "</think>"


@pytest.mark.parametrize(
    ("file", "fields"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": {"900": {"content": ANSWER, "special": False}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"9": {"content": ANSWER, "special": True}}}),
        (
            "tokenizer_config.json",
            {
                "added_tokens_decoder": {
                    "11": {"content": THINK, "special": True, "normalized": False},
                    "2": {"content": ANSWER, "special": False, "normalized": False},
                    "0": {"content": "<|endoftext|>", "special": True, "normalized": False},
                }
            },
        ),
        ("added_tokens.json", {ANSWER: 70, THINK: 71}),
        ("tokenizer_config.json", {"additional_special_tokens": [ANSWER, THINK, "<|im_end|>"]}),
        ("special_tokens_map.json", {"additional_special_tokens": [THINK]}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"15": {"content": "a", "special": False}}}),
    ],
)
def test_tokens_that_stand_beside_tokenizer_json(folder, transformers, file, fields):
    change(folder / file, **fields)
    text = f"is it {ANSWER}up{THINK}{ANSWER}?"
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    processor = Processor.load(folder)
    ids = processor.tokenise(text)
    assert ids == reference(text)["input_ids"]
    for skip in (True, False):
        assert processor.decode(ids, skip_special_tokens=skip) == reference.decode(ids, skip_special_tokens=skip)
    processor.save(folder / "again")
    assert Processor.load(folder / "again").tokenise(text) == ids


def test_added_tokens_that_cannot_be_read_are_named(folder):
    for entry in ("x", {"content": 3}):
        change(folder / "tokenizer_config.json", added_tokens_decoder={"900": entry})
        with pytest.raises(ValueError, match=r"tokenizer_config\.json: added tokens cannot be read: "):
            Processor.load(folder)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% generation %}{{ m.content }}!{% endgeneration %}\n{% endfor %}",
        "{% set x = 'a' %}{% generation %}{% set x = 'b' %}{{ x }}{% endgeneration %}{{ x }}",
        "{% generation %}\n  {% if true %}\nx\n  {% endif %}\n{% endgeneration %}\ny",
        "{{ messages | tojson }}",
        "{{ messages | tojson(indent=2) }}",
        "{{ messages | tojson(separators=(',', ':'), sort_keys=True) }}",
        "{{ {'b': 'h\u00e9'[0], 'a': 1} | tojson(ensure_ascii=True, sort_keys=true) }}",
        "{% if tools is not none or documents is not none %}a{% else %}b{% endif %}",
        "{% if unk_token is defined %}a{% else %}b{% endif %}{% if sep_token is defined %}c{{ sep_token }}{% endif %}",
        "{% for m in messages %}{% if loop.index > 3 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    ],
)
def test_templates_are_rendered_as_transformers_renders_them(folder, transformers, template):
    change(folder / "tokenizer_config.json", sep_token="<|im_end|>", image_token="<|image_pad|>")
    (folder / "chat_template.jinja").write_text(template)
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": PROMPT}]
    expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    processor = Processor.load(folder)
    assert processor.decode(processor.tokenise_chat(PROMPT), skip_special_tokens=False) == expected


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ messages[0].role + messages[0].content }}", "can only concatenate str"),
        ("{{ messages[0].content.strip() }}", "has no attribute 'strip'"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% for %}", "Expected an expression"),
        ("{{ raise_exception('no\npictures') }}", "no pictures"),
        ("{{ messages[0].content }}", "0 media placeholders for 1 media"),
    ],
)
def test_a_template_that_cannot_take_a_picture_is_one_line(folder, template, reason):
    tiny.build(TEXTS, ["user"], layout=LAYOUT).save(folder)
    (folder / "chat_template.jinja").write_text(template)
    processor = Processor.load(folder)
    with pytest.raises(PromptError) as caught:
        processor.outline(processor.tokenise_chat("<image>what", [("image", b"")]), [("image", b"")])
    assert reason in str(caught.value) and "\n" not in str(caught.value)


def test_named_templates_need_a_default_one(folder, transformers):
    change(
        folder / "tokenizer_config.json",
        chat_template=[{"name": "rag", "template": "r"}, {"name": "t", "template": "t"}],
    )
    with pytest.raises(ValueError, match="no default specified"):
        transformers.AutoTokenizer.from_pretrained(folder).get_chat_template()
    processor = Processor.load(folder)
    with pytest.raises(PromptError, match="of the chat templates rag, t none is the default one"):
        processor.tokenise_chat("what")
    assert len(processor.tokenise("what")) == 4  # without a template
    change(
        folder / "tokenizer_config.json",
        chat_template=[{"name": "t", "template": "t"}, {"name": "default", "template": "d"}],
    )
    assert Processor.load(folder).tokenise_chat("what") == processor.encode("d")
