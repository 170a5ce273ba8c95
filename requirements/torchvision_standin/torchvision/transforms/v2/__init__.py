from torchvision import stand_in as __getattr__  # noqa: F401
