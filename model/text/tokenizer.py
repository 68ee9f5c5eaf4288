"""Tokenize and detokenize as a Hugging Face folder defines, and hold the model's chat templates."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from ..config import ModelError
from ..errors import POINTER, refuse_pointer
from . import tiktoken_file
from .chat_template import REQUEST_SECONDS, SCRIPT, ChatTemplate, PromptError
from .worker import WorkerProcess

MAX_TEMPLATE = 65_536  # characters of a chat template in a request
# Tokens from which decoding releases the GIL; for fewer, reacquiring it may cost more.
LONG_DECODE = 1024
CHARACTERS_DROPPED = 4  # assumed input characters for each one kept by a normaliser
INFILL = (  # fill-in-the-middle tokens: (prefix, suffix, middle)
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
)
_NAMED = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class Tokenizer:
    """The tokenizer of a Hugging Face folder with its special and end tokens and chat templates."""

    def __init__(
        self,
        folder: str | Path,
        generation: Path | None = None,
        overrides: Mapping[str, Any] | None = None,
    ):
        """Read the tokenizer of `folder`.

        Args:
            generation: another folder with generation_config.json.
            overrides: entries that replace those of config.json.
        """
        folder = Path(folder)
        self._core = _read_core(folder)
        self._core.no_truncation()  # some folders have the settings of a training run
        self._core.no_padding()
        self.config = config = _read_json(folder / "tokenizer_config.json")
        token_map = _read_json(folder / "special_tokens_map.json")
        self.special_tokens = {
            name: token
            for name in _NAMED
            if (token := _token_content(config.get(name)) or _token_content(token_map.get(name)))
        }
        _mark_special(
            self._core,
            [*self.special_tokens.values(), *_extra_tokens(config), *_extra_tokens(token_map)],
        )
        generation_config = _read_json((generation or folder) / "generation_config.json")
        model = _read_json(folder / "config.json") | {
            k: v for k, v in generation_config.items() if v is not None
        }
        model |= overrides or {}
        self.bos_token_id: int | None = next(iter(self._ids(folder, "bos", model)), None)
        self.eos_token_ids = frozenset(self._ids(folder, "eos", model))
        self._templates = {
            name: ChatTemplate(source, self.special_tokens)
            for name, source in _read_templates(folder, config).items()
        }
        self._token_texts: dict[int, str] = {}
        # a text in prompts, and what is tokenized in its place
        self.replacement: tuple[str, str] = ("", "")
        self._request_worker = WorkerProcess(SCRIPT)  # renders templates from requests

    def _ids(self, folder: Path, kind: str, model: dict[str, Any]) -> list[int]:
        """The id of the bos or eos token, then the ids in the model's config files."""
        name = self.special_tokens.get(f"{kind}_token")
        named = None if name is None else self._core.token_to_id(name)
        listed = model.get(f"{kind}_token_id")
        listed = [] if listed is None else listed if isinstance(listed, list) else [listed]
        for token_id in listed:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
                raise ModelError(
                    f"{folder}: {kind}_token_id must be a token id or a list of them, got "
                    f"{str(token_id):.60}"
                )
        return [*([] if named is None else [named]), *listed]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text. Prompts from chat templates contain their special tokens: add none."""
        return self._encoding(text, add_special_tokens).ids

    def _encoding(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        # Only the library's batch methods release the GIL; "fast" omits offsets.
        text = check_unicode(text)
        before, after = self.replacement
        if before:
            text = text.replace(before, after)
        [encoding] = self._core.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding

    def encode_truncated(
        self, text: str, max_tokens: int, side: str = "right", add_special_tokens: bool = True
    ) -> list[int]:
        """The ids of a text, at most `max_tokens` of them; added special tokens are kept.

        Args:
            text: characters that cannot be among so many tokens are not tokenised, to save time.
            max_tokens: includes special tokens.
            side: "right" or "left", where the text is cut.
            add_special_tokens: whether special tokens are added.
        """
        longest = self.max_characters(max_tokens)
        encoding = self._encoding(
            text[-longest:] if side == "left" else text[:longest], add_special_tokens
        )
        excess = len(encoding.ids) - max_tokens
        if excess <= 0:
            return encoding.ids
        places = [
            place for place, sequence in enumerate(encoding.sequence_ids) if sequence is not None
        ]
        dropped = {*(places[:excess] if side == "left" else places[-excess:])}
        return [token for place, token in enumerate(encoding.ids) if place not in dropped]

    def encode_with_ends(self, text: str) -> tuple[list[int], list[int]]:
        """The ids of a text, and the end offset of each; 0 for added special tokens."""
        [encoding] = self._core.encode_batch([check_unicode(text)])
        return encoding.ids, [end for _, end in encoding.offsets]

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        """The ids of a text pair, and the index at which the second text begins."""
        [encoding] = self._core.encode_batch_fast([(check_unicode(first), check_unicode(second))])
        ids = encoding.ids
        sequence_ids = encoding.sequence_ids
        return ids, sequence_ids.index(1) if 1 in sequence_ids else len(ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of these ids; ids outside the vocabulary are ignored."""
        if not self.byte_tokens.isdisjoint(ids):
            return self._decode_bytes(ids, skip_special_tokens)
        if len(ids) < LONG_DECODE:
            return self._core.decode(ids, skip_special_tokens=skip_special_tokens)
        [text] = self._core.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        return text

    def _decode_bytes(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Decode with byte tokens. Each invalid byte becomes one U+FFFD, as in SentencePiece.

        The library replaces a whole run of byte tokens for one invalid byte, which would change
        characters that have been streamed already.
        """
        skipped = self.special_ids if skip_special_tokens else frozenset()
        tokens: list[str] = []
        run: list[int] = []
        for token_id in ids:
            token = None if token_id in skipped else self._core.id_to_token(token_id)
            if token is None:
                continue
            if token_id in self.byte_tokens:
                run.append(int(token[3:5], 16))
                continue
            tokens += _byte_tokens(run)
            run = []
            tokens.append(token)
        return self._core.decoder.decode(tokens + _byte_tokens(run))  # byte tokens imply a decoder

    def token_text(self, token_id: int) -> str:
        """The text of one token, with its leading space; U+FFFD for an incomplete character."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self.token_bytes(token_id).decode(errors="replace")
            if text:  # an id outside the vocabulary has none
                self._token_texts[token_id] = text
        return text

    def token_name(self, token_id: int) -> str | None:
        """The token as spelled in the vocabulary."""
        return self._core.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token adds to a text; empty for ids outside the vocabulary."""
        token = self._core.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self.byte_tokens:
            return bytes([int(token[3:5], 16)])
        if token_id in self._added_ids:
            return token.encode()
        if '"ByteLevel"' in self._decoder:
            return b"".join(
                _BYTE_BY_CHARACTER.get(character, character.encode()) for character in token
            )
        if '"WordPiece"' in self._decoder:
            return (token[2:] if token.startswith("##") else " " + token).encode()
        if '"BPEDecoder"' in self._decoder:
            return token.replace("</w>", " ").encode()
        return token.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()

    @cached_property
    def infill(self) -> tuple[int, int, int] | None:
        """The ids of the first complete triple in INFILL; None if the model has none."""
        for names in INFILL:
            prefix, suffix, middle = map(self._core.token_to_id, names)
            if prefix is not None and suffix is not None and middle is not None:
                return prefix, suffix, middle
        return None

    @cached_property
    def shows_bytes(self) -> bool:
        """Whether the text of tokens is their bytes joined, apart from `drops_space`."""
        rewrites = ("WordPiece", "BPEDecoder", "CTC")  # they add and remove spaces between tokens
        return self._decoder != "" and not any(f'"{kind}"' in self._decoder for kind in rewrites)

    @cached_property
    def drops_space(self) -> bool:
        """Whether decoding drops a space at the beginning of a text."""
        tokens = (token for token in range(self.vocab_size) if token not in self.special_ids)
        first = next((token for token in tokens if self.token_bytes(token).startswith(b" ")), None)
        return first is not None and not self.decode([first], skip_special_tokens=False).startswith(
            " "
        )

    def max_characters(self, num_tokens: int) -> int:
        """Maximum number of characters of a text that becomes `num_tokens` tokens.

        None of them may be the unknown token, which stands for a word of any length.
        """
        per_token = (
            self.longest_token if self.keeps_characters else CHARACTERS_DROPPED * self.longest_token
        )
        return num_tokens * per_token

    @cached_property
    def longest_token(self) -> int:
        """Number of characters of the longest token, as the vocabulary spells it."""
        return max(map(len, self._core.get_vocab(with_added_tokens=True)), default=1)

    @cached_property
    def keeps_characters(self) -> bool:
        """Whether decoding restores every character: byte-level without normalisation."""
        strips = any(
            token.lstrip or token.rstrip for token in self._core.get_added_tokens_decoder().values()
        )
        alphabet = {name for name in _BYTE_BY_CHARACTER if self._core.token_to_id(name) is not None}
        return (
            '"ByteLevel"' in self._decoder
            and self._core.normalizer is None
            and not strips
            and len(alphabet) == 256
        )

    def get_vocab(self) -> dict[str, int]:
        """The ids by token, as spelled in the vocabulary, with added tokens."""
        return self._core.get_vocab(with_added_tokens=True)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return max(self._core.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids that `skip_special_tokens` removes."""
        return frozenset(
            i for i, token in self._core.get_added_tokens_decoder().items() if token.special
        )

    @cached_property
    def special_texts(self) -> dict[str, int]:
        """The ids of special tokens by text."""
        return {
            token.content: i
            for i, token in self._core.get_added_tokens_decoder().items()
            if token.special
        }

    @cached_property
    def byte_tokens(self) -> frozenset[int]:
        """The ids of tokens such as <0x0A>, if the decoder reads them as bytes."""
        if '"ByteFallback"' not in self._decoder:
            return frozenset()
        token_ids = (self._core.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        return frozenset(token_id for token_id in token_ids if token_id is not None)

    @cached_property
    def _added_ids(self) -> frozenset[int]:
        return frozenset(self._core.get_added_tokens_decoder())

    @cached_property
    def _decoder(self) -> str:
        """The decoder's JSON, which is searched for its types."""
        decoder = self._core.decoder
        return "" if decoder is None else decoder.__getstate__().decode()

    @property
    def chat_template(self) -> str | None:
        """The source of the template for conversations without tools."""
        return self.template_for([])

    def template_for(self, tools: Sequence[Any]) -> str | None:
        """The source of the template for conversations with these tools."""
        template = self._templates.get(
            "tool_use" if tools and "tool_use" in self._templates else "default"
        )
        return None if template is None else template.source

    def adopt(self, template: str) -> None:
        """Replace the model's chat templates."""
        if [current.source for current in self._templates.values()] != [template]:
            self._templates = {"default": ChatTemplate(template, self.special_tokens)}

    def apply_chat_template(
        self,
        messages: Sequence[Any],
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """Render a conversation with the model's template or the source `chat_template`.

        `kwargs` are variables of the template, such as tools.
        """
        if chat_template is not None:
            if not isinstance(chat_template, str) or not 1 <= len(chat_template) <= MAX_TEMPLATE:
                description = (
                    f"{len(chat_template)} characters"
                    if isinstance(chat_template, str)
                    else ascii(chat_template)
                )
                raise PromptError(
                    f"chat template: must be a Jinja source of 1 to {MAX_TEMPLATE} characters, got "
                    f"{description:.60}"
                )
            template = ChatTemplate(
                chat_template, self.special_tokens, self._request_worker, REQUEST_SECONDS
            )
            return template.render(messages, add_generation_prompt, **kwargs)
        name = "tool_use" if kwargs.get("tools") and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise PromptError(
                "chat template: this model has none, so it was not made for conversations: "
                "continue a prompt instead (/v1/completions, quire generate, LLM.generate), or "
                "give a template (--chat-template FILE)"
            )
        return self._templates[name].render(messages, add_generation_prompt, **kwargs)


def check_unicode(text: str) -> str:
    """Return the text if it is valid Unicode, else raise an error."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"text: must be valid Unicode without lone surrogates, got {text[error.start]!a} at "
            f"{error.start}"
        ) from None
    return text


def _byte_tokens(run: list[int]) -> list[str]:
    """The tokens of a run of bytes, with U+FFFD for each invalid byte."""
    text = bytes(run).decode(errors="surrogateescape")  # a bad byte becomes one surrogate
    return [
        token
        for character in text
        for token in (
            ["\ufffd"]
            if "\udc80" <= character <= "\udcff"
            else [f"<0x{byte:02X}>" for byte in character.encode()]
        )
    ]


def _byte_characters() -> dict[str, bytes]:
    """GPT-2's table from printable characters in byte-level vocabularies to bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(b): bytes([b]) for b in printable} | {
        chr(256 + i): bytes([b]) for i, b in enumerate(unprintable)
    }


_BYTE_BY_CHARACTER = _byte_characters()


def find_tokenizer(folder: Path) -> Path:
    """The file of a folder from which its tokenizer is read."""
    for path in (folder / "tokenizer.json", folder / tiktoken_file.NAME):
        if path.is_file():
            with path.open("rb") as file:
                refuse_pointer(path, file.read(POINTER))
            return path
    other_files = [
        name for name in ("tokenizer.model", "vocab.json", "vocab.txt") if (folder / name).is_file()
    ]
    hint = (
        (
            f" (there is {other_files[0]}: transformers' save_pretrained of its fast tokenizer "
            "writes one)"
        )
        if other_files
        else ""
    )
    raise ModelError(
        f"{folder}: no tokenizer.json, which Quire needs{hint}; or load with "
        "skip_tokenizer_init=True"
    )


def _read_core(folder: Path) -> tokenizers.Tokenizer:
    path = find_tokenizer(folder)
    if path.name == tiktoken_file.NAME:
        return tiktoken_file.read(path, _read_json(folder / "tokenizer_config.json"))
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception
        raise ModelError(
            f"{path}: not a tokenizer that the tokenizers library reads: {_one_line(error)}"
        ) from None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    refuse_pointer(path, path.read_bytes())
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not JSON: {_one_line(error)}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must hold a JSON object, got {type(value).__name__}")
    return value


def _token_content(token: Any) -> str | None:
    """The text of a token given as a string or an object with "content"."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) and content else None


def _extra_tokens(config: dict[str, Any]) -> list[str]:
    """The special tokens without a role name."""
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    added = config.get("added_tokens_decoder")
    values = [
        *(extra.values() if isinstance(extra, dict) else extra if isinstance(extra, list) else ()),
        *(
            token
            for token in (added.values() if isinstance(added, dict) else ())
            if token.get("special")
        ),
    ]
    return [token for token in map(_token_content, values) if token is not None]


def _mark_special(core: tokenizers.Tokenizer, tokens: list[str]) -> None:
    """Mark existing tokens special that only the files beside tokenizer.json list."""
    special = {token.content for token in core.get_added_tokens_decoder().values() if token.special}
    core.add_special_tokens(
        [t for t in tokens if t not in special and core.token_to_id(t) is not None]
    )


def _read_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """The chat templates by name; a template file overrides tokenizer_config.json."""
    templates = config.get("chat_template")
    path = folder / "chat_template.jinja"
    if path.is_file():
        templates = path.read_text(encoding="utf-8")
    elif (folder / "chat_template.json").is_file():
        templates = _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(templates, list) and all(isinstance(entry, dict) for entry in templates):
        templates = {entry.get("name"): entry.get("template") for entry in templates}
    elif isinstance(templates, str):
        templates = {"default": templates}
    templates = {} if templates is None else templates
    if not isinstance(templates, dict) or not all(
        isinstance(text, str) for item in templates.items() for text in item
    ):
        raise ModelError(
            f"{folder}: chat_template must be a text or a list of named texts, got "
            f"{str(templates):.60}"
        )
    extra = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    return templates | {path.stem: path.read_text(encoding="utf-8") for path in extra}


def _one_line(error: BaseException) -> str:
    return re.sub(r"\s+", " ", str(error))[:200]
