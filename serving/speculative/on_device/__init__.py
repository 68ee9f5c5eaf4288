"""Methods that draft on the device, within the step: a model, a part of the target, or heads."""
