"""How quill, the bundled model, is trained and evaluated."""
