"""Other frameworks' batches, recordings and configurations, converted to ours and back.

To add a framework: padded tensors need only a ``PaddedLayout`` (``padded.layout``); another form needs a folder here
with a ``BatchCodec`` (``mock_scheduler.scheduler``). Its own keys are read by ``mock_scheduler.config.dialects``.
"""
