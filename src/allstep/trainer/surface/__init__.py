"""`Trainer`, part by part: what people construct, call and override."""
