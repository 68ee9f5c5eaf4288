"""What is on the device: the step's arrays, the state, the compiled step, copies of pages,
experts.
"""
