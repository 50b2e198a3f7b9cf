"""`overt info`: versions, devices, extras and active fast paths."""

from __future__ import annotations

import importlib
import platform

from overt.cli.shared import app, package_version


@app.command(rich_help_panel="Start here")
def info() -> None:
    """Print versions, devices, extras and active fast paths."""
    import torch
    from rich.console import Console
    from rich.table import Table

    from overt._extras import EXTRAS, present
    from overt.mechanisms.backend import switched_off
    from overt.mechanisms.noise import compiled_kernels

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")

    def section(title: str) -> None:
        table.add_row("", "")
        table.add_row(f"[cyan]{title}[/cyan]", "")

    section("Versions")
    table.add_row("python", platform.python_version())
    packages = (
        "overt",
        "torch",
        "transformers",
        "torch-geometric",
        "numpy",
        "scipy",
        "numba",
        "triton",
        "safetensors",
    )
    for package in packages:
        table.add_row(package, package_version(package))

    section("Devices")
    table.add_row("cpu", f"{torch.get_num_threads()} threads, {platform.machine()}")
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(number)
            table.add_row(f"cuda:{number}", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    else:
        table.add_row("cuda", "none")
    if torch.backends.mps.is_available():
        table.add_row("mps", "available")

    section("Extras")
    for extra, modules in EXTRAS.items():
        missing = [module for module in modules if not present(module)]
        absent = f"missing {', '.join(missing)}: pip install 'overt\\[{extra}]'"
        table.add_row(extra, absent if missing else "installed")

    section("Fast paths")
    noise = "active (numba)"
    if (off := switched_off()) is not None:
        noise = f"not active: {off}"
    elif compiled_kernels() is None:
        noise = f"not active: numba cannot be imported ({_import_error('numba')}); torch operations are used"
    table.add_row("compiled loops, CPU", noise)
    table.add_row(
        "closed-form KL",
        f"not active: {off}"
        if off is not None
        else "active for dot-product maps under padding and causal masks; other maps use the dense KL "
        "(logger 'overt', level DEBUG, reports where)",
    )
    for name, why in _kernels().items():
        table.add_row(name, why)
    Console().print(table)


def _kernels() -> dict[str, str]:
    """Whether fused kernels run on each GPU."""
    import torch

    from overt.mechanisms.backend import KERNELS, active

    if not torch.cuda.is_available():
        return {
            "fused kernels": "not active: torch sees no GPU; plain operations and compiled loops are used"
        }
    rows = {}
    for number in range(torch.cuda.device_count()):
        reason = active(KERNELS, torch.device("cuda", number))
        scope = (
            "active for plain products under padding and causal masks, heads up to 128 wide "
            "(logger 'overt', level DEBUG, reports for each attention which path ran and why)"
        )
        rows[f"fused kernels, cuda:{number}"] = scope if reason is None else f"not active: {reason}"
    return rows


def _import_error(module: str) -> str:
    try:
        importlib.import_module(module)
    except ImportError as error:
        return str(error)
    return f"{module} itself imports"
