//! Data files, written by the test that reads them.

use safetensors::tensor::{Dtype, TensorView};

/// A batch file of rows of `seq` tokens.
pub fn batch_file(input_ids: &[i32], targets: &[i32], seq: usize) -> Vec<u8> {
    let bytes = |values: &[i32]| -> Vec<u8> { bytemuck::cast_slice(values).to_vec() };
    let tensors = [("input_ids", bytes(input_ids)), ("targets", bytes(targets))];
    let views = tensors.iter().map(|(name, bytes)| {
        let shape = vec![input_ids.len() / seq, seq];
        (*name, TensorView::new(Dtype::I32, shape, bytes).unwrap())
    });
    safetensors::serialize(views, None).unwrap()
}

/// What precedes the tokens in llm.c's files.
pub fn llmc_header(magic: i32, version: i32, tokens: usize) -> Vec<u8> {
    let mut header = [0i32; 256];
    header[..3].copy_from_slice(&[magic, version, tokens as i32]);
    header.into_iter().flat_map(i32::to_le_bytes).collect()
}

/// llm.c's file of u16 tokens.
pub fn llmc_u16(tokens: &[u16]) -> Vec<u8> {
    [llmc_header(20240520, 1, tokens.len()), bare_u16(tokens)].concat()
}

/// Tokens and nothing else.
pub fn bare_u16(tokens: &[u16]) -> Vec<u8> {
    tokens
        .iter()
        .flat_map(|token| token.to_le_bytes())
        .collect()
}
