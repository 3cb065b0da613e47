"""Names of the files in the ``output_dir`` of a run, an alignment and the doctor.

Contract: imports nothing; whoever writes or reads one of these takes its name from here.
"""

from __future__ import annotations

#: The whole configuration, as it was loaded.
CONFIG_FILE = "config.yaml"
#: Metrics, one JSON object per global step.
METRICS_FILE = "metrics.jsonl"
#: What a completed run says about itself; there only where it completed.
RUN_FILE = "run.json"
#: The configuration of a run of a command, from which it can be started again.
COMMAND_FILE = "command.yaml"
#: What the instruments do in a run of a command; ``MOCK_SCHEDULER_RUN`` names it.
ATTACHED_FILE = "attached_run.json"
#: What an attached run started from: its own state, or the baseline's.
START_FILE = "start.json"
#: Folder of a trace with the state of the start that no traced kind has: moments, and padding rows of the vocabulary.
START_FOLDER = "start"
#: Why a run failed.
ERROR_FILE = "error.json"
#: URL, process and token of a training service, while it is ready; for its owner alone.
SERVICE_FILE = "service.json"
#: Folder of the records of the source files that the processes of a completed run loaded.
CODE_FOLDER = "code"
#: What was built, answered and suppressed (``ledger.Ledger``).
LEDGER_FILE = "ledger.json"
#: The terminal output of a run that an alignment or the doctor started.
LOG_FILE = "run.log"
#: Folder of what is known of a run's job on a cluster: its record, its ends, the cluster's own files.
JOB_FOLDER = "job"
#: Folder of gradients and parameters (``trace``).
TRACE_FOLDER = "trace"
#: Folder of the collectives that ranks have begun in a step that goes on, or did not end (``trace.begun_calls``).
COLLECTIVES_FOLDER = "collectives"
#: Folder of operation logs (``determinism.operations``).
OPERATIONS_FOLDER = "operations"
#: Folder of TensorBoard's files.
TENSORBOARD_FOLDER = "tensorboard"
#: Folder of checkpoints, where the configuration names no other.
CHECKPOINTS_FOLDER = "checkpoints"
#: The noise of a baseline, in its folder or in one around it.
NOISE_FILE = "noise.json"
#: The result of an alignment.
ALIGN_FILE = "align.json"
#: The result of the doctor.
DOCTOR_FILE = "doctor.json"
#: Name and folder of the run of an alignment that candidates are compared with.
BASELINE_NAME = "baseline"
