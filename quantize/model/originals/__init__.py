"""Models as they are published: one file per stored form, and the store that dequantizes it. As `model`."""
