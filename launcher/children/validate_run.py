"""Build every setting of a written run for real, short of the model: what would fail at start is found here.

Runs in the training Python. Reads a JSON request on stdin: folder, require_devices. Prints one JSON document:
{"problems": [sentence, ...]}. train.py is imported, not run: its settings stand at the top of the module.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
from pathlib import Path

OPTIMIZER_PACKAGES = {
    "bnb": "bitsandbytes",
    "paged": "bitsandbytes",
    "lion": "bitsandbytes",
    "ademamix": "bitsandbytes",
    "rmsprop_bnb": "bitsandbytes",
    "adamw_8bit": "bitsandbytes",
    "adamw_torch_8bit": "torchao",
    "adamw_torch_4bit": "torchao",
    "galore": "galore_torch",
    "apollo": "apollo_torch",
    "lomo": "lomo_optim",
    "adalomo": "lomo_optim",
    "schedule_free": "schedulefree",
    "stable_adamw": "optimi",
    "grokadamw": "grokadamw",
}
"""Beginning or part of an `optim` name -> the module it needs; a longer name decides before a shorter."""
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.safetensors.index.json")
YAML_FILE = "accelerate.yaml"


def words(error: BaseException) -> str:
    """An error as a sentence: its own words on one line."""
    return " ".join(str(error).split())[:400] or type(error).__name__


# ---------------------------------------------------------------------------------------------------
# accelerate.yaml


def nested_problems(config, known: set[str]) -> list[str]:
    """Keys inside the blocks of accelerate.yaml that the launcher does not know, and so would ignore."""
    problems = []
    for block, prefix in (("fsdp_config", "fsdp_"), ("deepspeed_config", ""), ("parallelism_config", "")):
        for key in getattr(config, block):
            full = key if key.startswith(prefix) else prefix + key
            if full not in known:
                problems.append(f"{YAML_FILE} {block}.{key} is no setting of this accelerate, which would ignore it")
    return problems


def launch_environment(problems: list[str]) -> tuple[object, dict[str, str]]:
    """The parsed file, and the environment that `accelerate launch` would give every process."""
    from accelerate.commands import launch
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

    config = load_config_from_file(YAML_FILE)
    parser = launch.launch_command_parser()
    known = {action.dest for action in parser._actions}
    problems += nested_problems(config, known)
    arguments = ["--config_file", YAML_FILE]
    if config.num_machines > 1:
        arguments += ["--machine_rank", "0", "--main_process_ip", "127.0.0.1", "--main_process_port", "0"]
    args, _, _ = launch._validate_launch_command(parser.parse_args([*arguments, "train.py"]))
    if args.use_deepspeed:
        from accelerate.utils.launch import prepare_deepspeed_cmd_env

        fields = list(config.deepspeed_config)
        args.deepspeed_fields_from_accelerate_config = ",".join(fields)
        return config, prepare_deepspeed_cmd_env(args)[1]
    if args.multi_gpu or args.use_fsdp:
        return config, prepare_multi_gpu_env(args)
    return config, prepare_simple_launcher_cmd_env(args)[1]


@contextlib.contextmanager
def environment(values: dict[str, str]):
    """Take the variables that a launched process has, for as long as needed."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def plugin_problems(config, env: dict[str, str]) -> list[str]:
    """What accelerate's own classes say about sharding and parallel sizes."""
    problems: list[str] = []
    with environment(env):
        if env.get("ACCELERATE_USE_FSDP") == "true":
            problems += attempt(f"{YAML_FILE} fsdp_config", fsdp_plugin)
        if env.get("ACCELERATE_USE_DEEPSPEED") == "true":
            problems += deepspeed_problems()
        if env.get("ACCELERATE_USE_PARALLELISM_CONFIG") == "true":
            problems += attempt(f"{YAML_FILE} parallelism_config", lambda: mesh(config))
    return problems


def attempt(what: str, build) -> list[str]:
    """The problem that building it shows, if any."""
    try:
        build()
    except Exception as error:  # a class of any library, checking itself
        return [f"{what}: {words(error)}"]
    return []


def fsdp_plugin() -> None:
    """FSDP settings as every process will read them."""
    from accelerate.utils import FullyShardedDataParallelPlugin

    version = os.environ["FSDP_VERSION"]
    if version != "2":
        raise ValueError(f"fsdp_version is {version}, the run was planned for 2")
    FullyShardedDataParallelPlugin()


def deepspeed_problems() -> list[str]:
    """DeepSpeed settings as every process will read them."""
    if importlib.util.find_spec("deepspeed") is None:
        return [needs("deepspeed", "ZeRO")]
    from accelerate.utils import DeepSpeedPlugin
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    zero = json.loads(Path("deepspeed.json").read_text(encoding="utf-8")).get("zero_optimization", {})
    return [
        *attempt("deepspeed.json", DeepSpeedPlugin),
        *attempt("deepspeed.json zero_optimization", lambda: DeepSpeedZeroConfig(**zero)),
    ]


def mesh(config) -> None:
    """Sizes of the mesh, and that they make the number of processes."""
    from accelerate import ParallelismConfig

    sizes = ParallelismConfig()
    if sizes.total_size != config.num_processes:
        raise ValueError(f"the sizes make {sizes.total_size} processes, num_processes is {config.num_processes}")


# ---------------------------------------------------------------------------------------------------
# train.py


def load_script():
    """train.py as a module: its imports and its settings, without the run."""
    spec = importlib.util.spec_from_file_location("train", "train.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["train"] = module  # dataset workers look functions up by this name
    sys.dont_write_bytecode = True  # nothing is left in the run folder
    spec.loader.exec_module(module)
    return module


def config_class(script):
    """The config class that the script imported: SFTConfig and its like."""
    names = [
        name for name in vars(script) if name.endswith("Config") and name not in ("LoraConfig", "BitsAndBytesConfig")
    ]
    return getattr(script, names[0])


def arguments_here(script, config) -> dict:
    """The script's arguments, as this one process without a card can be asked about them."""
    arguments = {**script.CONFIG, "use_cpu": True}
    arguments.pop("tf32", None)
    if "num_generations" in arguments and "generation_batch_size" not in arguments:
        # TRL multiplies by the number of processes, of which there is one here.
        steps = arguments.pop("steps_per_generation", None) or arguments["gradient_accumulation_steps"]
        batch = arguments["per_device_train_batch_size"] * config.num_processes
        arguments["generation_batch_size"] = batch * steps
    return arguments


def config_problems(script, config) -> list[str]:
    """Whether TRL's own class takes every argument."""
    cls = config_class(script)
    fields = set(cls.__dataclass_fields__)
    unknown = [name for name in script.CONFIG if name not in fields]
    if unknown:
        return [f"{cls.__name__} of this TRL has no setting {name}; remove it from trl:" for name in unknown]
    return attempt(cls.__name__, lambda: cls(**arguments_here(script, config)))


def package_problems(script) -> list[str]:
    """Packages that the settings name without importing."""
    problems = []
    config = script.CONFIG
    optimizer = config.get("optim", "")
    matches = [part for part in OPTIMIZER_PACKAGES if part in optimizer]
    if matches:
        module = OPTIMIZER_PACKAGES[max(matches, key=len)]
        if importlib.util.find_spec(module) is None:
            problems.append(needs(module, f"optim {optimizer}"))
    model = config.get("model_init_kwargs", {})
    if model.get("attn_implementation") == "flash_attention_2" and not (
        importlib.util.find_spec("flash_attn") or importlib.util.find_spec("kernels")
    ):
        problems.append(needs("flash-attn or kernels", "attention flash_attention_2"))
    if config.get("use_liger_kernel") and importlib.util.find_spec("liger_kernel") is None:
        problems.append(needs("liger-kernel", "loss_path liger"))
    if hasattr(script, "QUANTIZATION") and importlib.util.find_spec("bitsandbytes") is None:
        problems.append(needs("bitsandbytes", "method qlora"))
    return problems


def needs(package: str, purpose: str) -> str:
    """One sentence for a package that is not there."""
    return f"the training Python {sys.executable} has no {package}, which {purpose} needs; install it there"


def file_problems(script) -> list[str]:
    """Local model and data that are not there."""
    problems = []
    model, dataset = Path(script.MODEL), Path(script.DATASET)
    if model.is_absolute():
        if not (model / "config.json").is_file():
            problems.append(f"model {model} has no config.json")
        elif not any(next(model.glob(pattern), None) for pattern in WEIGHT_FILES):
            problems.append(f"model {model} has a config but no weights; training would start from nothing")
    if dataset.is_absolute() and not dataset.is_file():
        problems.append(f"data {dataset} does not exist")
    return problems


def device_problems(config) -> list[str]:
    """Fewer cards than processes on this node."""
    import torch

    if config.use_cpu:
        return []
    wanted, found = config.num_processes // config.num_machines, torch.cuda.device_count()
    if found >= wanted:
        return []
    return [f"the run starts {wanted} processes here, torch sees {found} GPUs; check driver and CUDA_VISIBLE_DEVICES"]


def validate(folder: Path, require_devices: bool) -> list[str]:
    """Every problem of the run folder, as sentences."""
    os.chdir(folder)
    problems: list[str] = []
    try:
        config, env = launch_environment(problems)
    except Exception as error:  # the launcher's own checks raise ValueError, OSError, YAML's errors
        return [*problems, f"{YAML_FILE}: {words(error)}"]
    problems += plugin_problems(config, env)
    if require_devices:
        problems += device_problems(config)
    try:
        script = load_script()
    except Exception as error:  # whatever an import or a settings class raises
        return [*problems, f"train.py does not load: {type(error).__name__}: {words(error)}"]
    return [*problems, *config_problems(script, config), *package_problems(script), *file_problems(script)]


def main() -> int:
    """Read the request, answer it."""
    from child_guard import read_request

    request = read_request()
    # Libraries print while they load; stdout is for the one document.
    with contextlib.redirect_stdout(sys.stderr):
        try:
            answer = {"problems": validate(Path(request["folder"]), request["require_devices"])}
        except ModuleNotFoundError as error:
            message = f"the training Python {sys.executable} has no {error.name}; install it there"
            answer = {"error": {"kind": "environment", "message": message}}
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
