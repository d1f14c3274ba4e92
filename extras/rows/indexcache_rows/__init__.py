"""What a row of data may be beside text and token ids: a conversation, a question with its answer, a logged request."""
