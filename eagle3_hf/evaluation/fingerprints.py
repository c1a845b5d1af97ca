"""Which models were measured: their names for a reader, and hashes by which a resumed run recognises them."""

import hashlib
from pathlib import Path


def name_of(model) -> str:
    """Return the name under which a model was loaded: its Hub id, or the name of its folder."""
    name = str(getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__)
    return Path(name).name if Path(name).exists() else name


def model_fingerprint(model) -> str:
    """Return a hash of a model's config and of a few values of each of its parameters."""
    digest = hashlib.sha256()
    for name, parameter in getattr(model, "named_parameters", lambda: ())():
        digest.update(name.encode())
        if parameter.device.type != "meta" and parameter.numel():
            step = max(1, parameter.numel() // 16)
            digest.update(parameter.detach().flatten()[::step].float().cpu().numpy().tobytes())
    config = getattr(model, "config", None)
    if config is not None:
        saved = config.to_dict()
        for volatile in ("_name_or_path", "transformers_version", "dtype", "torch_dtype"):  # not what it computes
            saved.pop(volatile, None)
        digest.update(repr(sorted(saved.items(), key=lambda item: item[0])).encode())
    return digest.hexdigest()[:16]
