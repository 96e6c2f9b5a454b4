"""How a model trains, and how it turns into an inference engine and back. The only folder that imports deepspeed."""
