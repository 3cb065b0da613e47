"""The plugin that verl loads in each of its processes: entry-point group ``verl.plugins``, or

    VERL_USE_EXTERNAL_MODULES=mock_scheduler.adapters.verl.plugin

Contract: without ``MOCK_SCHEDULER_VERL`` in the environment nothing is touched. Whether it was loaded, or why not, is
kept (``suppress.check_process``): verl goes on without a plugin that fails.
"""

from mock_scheduler.adapters.verl.suppress import prepare_process

prepare_process()
