"""Converts a GGUF file into a Hugging Face folder, once.

A conversion takes many seconds and a start may be killed at any of them, so a folder under its final name is always
whole: it is written under another name and renamed when everything is on disk. A lock lets a second process wait for
the first instead of doing the work twice; the operating system drops it when its holder dies.
"""

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import structlog

from kvwatch_engine.contracts.errors import ModelError
from kvwatch_engine.model.fingerprint import file_digest

CONVERTER_VERSION = 2
"""Part of the converted folder's name; raised whenever the same file would be converted differently."""

logger = structlog.get_logger(__name__)

_DIGEST_DIGITS = 16
_BF16_BYTES = 2


def convert_gguf(file: Path, models_dir: Path) -> Path:
    """Return the folder that a GGUF file was converted to, converting it if that was not done before.

    Matrices of a quantised file are kept in bfloat16, whose rounding is small beside that of the quantisation; the
    folder then is the model, for whoever loads it. Other values are kept in float32. The folder's name carries a hash
    of the file's content, so that another file, wherever it lies, never meets an old conversion.

    Args:
        file: the GGUF file.
        models_dir: where converted models are kept.

    Raises:
        ModelError: the file cannot be read by transformers, or the folder cannot be written.
    """
    stem = re.sub(r"[^\w.-]", "_", file.stem)
    try:
        folder = models_dir / f"{stem}-{file_digest(file)[:_DIGEST_DIGITS]}-v{CONVERTER_VERSION}"
        if folder.is_dir():
            return folder
        models_dir.mkdir(parents=True, exist_ok=True)
        with _locked(models_dir / f".{folder.name}.lock"):
            if not folder.is_dir():
                _convert(file, folder)
    except OSError as error:
        raise ModelError(
            f"{file.name} cannot be converted in {models_dir}: {error}; choose another folder with --cache-dir"
        ) from error
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock between processes; the file stays, since removing it would let two hold "the" lock."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert(file: Path, folder: Path) -> None:
    """Convert under another name, then rename. The lock is held: what others left half-written is removed first."""
    pattern = f".{folder.name}.partial-"
    for left_over in folder.parent.glob(f"{pattern}*"):
        shutil.rmtree(left_over, ignore_errors=True)
    unfinished = folder.parent / f"{pattern}{os.getpid()}"
    unfinished.mkdir()
    try:
        logger.info("converting the model once", file=file.name)
        _write_folder(file, unfinished)
        _bring_to_disk(unfinished)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write_folder(file: Path, folder: Path) -> None:
    """Write weights, configuration and tokenizer.

    Raises:
        ModelError: transformers cannot read the file.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with _without_progress_bars():
        try:
            model = AutoModelForCausalLM.from_pretrained(
                file.parent,
                gguf_file=file.name,
                quantization_config=GgufConfig(dequantize=True),
                dtype=torch.float32,
                local_files_only=True,
            )
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
        except Exception as error:  # the readers raise many kinds, and all mean the same to a user
            raise ModelError(f"{file.name} cannot be read as a GGUF model: {error}") from error
        if file.stat().st_size < _BF16_BYTES * model.num_parameters():  # so it must be quantised
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.data = parameter.data.to(torch.bfloat16)
        try:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        except Exception as error:  # a full disk is an OSError here, a SafetensorError there
            raise ModelError(
                f"{file.name} cannot be converted: {error}; make room, or choose another folder with --cache-dir"
            ) from error


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Keep transformers' progress bars out of the server's log."""
    from transformers import modeling_gguf_pytorch_utils as reader
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    bar = getattr(reader, "tqdm", None)  # the GGUF reader has a bar of its own, which no setting reaches
    if bar is not None:
        reader.tqdm = partial(bar, disable=True)
    try:
        yield
    finally:
        if bar is not None:
            reader.tqdm = bar
        if was_enabled:
            logging.enable_progress_bar()


def _bring_to_disk(folder: Path) -> None:
    """Wait until a folder's files are on the disk: after a power cut the final name must never show empty files."""
    readable = folder.stat().st_mode & 0o666
    for path in folder.iterdir():
        # safetensors creates files for the user alone; others may read what they may read of the folder.
        path.chmod(readable)
        with path.open("rb") as file:
            os.fsync(file.fileno())
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
